use std::time::Duration;

use bytes::{Bytes, BytesMut};
use protocol::codec::{self, CodecError, MAX_TRANSFER_BYTES};
use protocol::transfer::PushReply;
use quinn::{RecvStream, SendStream};
use runtime::framing::{FramingError, MessageReader, MessageWriter, read_exact, read_message, write_message};
use runtime::quic::code;

use super::{Pair, pair, soon};

/// One direction of a fresh stream: what the prefill side writes, the decode side reads.
async fn stream(pair: &Pair) -> (SendStream, RecvStream) {
    let (mut send, _) = pair.dialled.connection.open_bi().await.expect("a stream");
    // A stream exists for the peer once it carries something.
    write_message(&mut send, &PushReply::Committed, MAX_TRANSFER_BYTES)
        .await
        .expect("sent");
    let (_, mut receive) = soon("the stream", pair.accepted.connection.accept_bi())
        .await
        .expect("a stream");
    let first = read_message::<PushReply>(&mut receive, MAX_TRANSFER_BYTES).await;
    assert_eq!(first, Ok(Some(PushReply::Committed)));
    (send, receive)
}

fn refused(reason: &str) -> PushReply {
    PushReply::Refused {
        reason: reason.to_owned(),
    }
}

#[tokio::test]
async fn messages_and_payloads_arrive_in_order_and_the_end_is_an_end() {
    let pair = pair().await;
    let (send, receive) = stream(&pair).await;
    let mut writer = MessageWriter::new(send, MAX_TRANSFER_BYTES);
    let payload = Bytes::from((0..300_000_u32).map(|n| (n % 251) as u8).collect::<Vec<_>>());
    writer.write(&refused("one")).await.expect("sent");
    let expected = payload.clone();
    let sending = tokio::spawn(async move {
        writer.write_with_payload(&refused("two"), payload).await.expect("sent");
        writer.write(&refused("three")).await.expect("sent");
        writer.finish().expect("open");
        writer.stopped().await
    });
    let mut reader = MessageReader::new(receive, MAX_TRANSFER_BYTES);
    let mut bytes = BytesMut::new();
    assert_eq!(reader.next().await, Ok(Some(refused("one"))));
    assert_eq!(reader.next().await, Ok(Some(refused("two"))));
    reader.payload(expected.len(), &mut bytes).await.expect("arrives");
    assert_eq!(bytes, expected);
    assert_eq!(reader.next().await, Ok(Some(refused("three"))));
    assert_eq!(reader.next::<PushReply>().await, Ok(None));
    assert_eq!(soon("the acknowledgement", sending).await.expect("no panic"), Ok(()));
}

#[tokio::test]
async fn a_dropped_writer_is_a_cancel_and_not_an_end() {
    let pair = pair().await;
    let (send, receive) = stream(&pair).await;
    drop(MessageWriter::new(send, MAX_TRANSFER_BYTES));
    let mut reader = MessageReader::new(receive, MAX_TRANSFER_BYTES);
    let cancelled = || FramingError::Reset {
        code: code::CANCELLED.into_inner(),
    };
    assert_eq!(soon("the reset", reader.next::<PushReply>()).await, Err(cancelled()));

    let (send, receive) = stream(&pair).await;
    let mut writer = MessageWriter::new(send, MAX_TRANSFER_BYTES);
    let mut reader = MessageReader::new(receive, MAX_TRANSFER_BYTES);
    reader.stop(code::CANCELLED);
    assert_eq!(soon("the stop", writer.stopped()).await, Err(cancelled()));
}

#[tokio::test]
async fn an_end_inside_a_message_or_payload_is_an_error() {
    let pair = pair().await;
    let bytes = codec::encode(&refused("cut"), MAX_TRANSFER_BYTES).expect("encodes");
    for cut in [3, bytes.len() - 1] {
        let (mut send, receive) = stream(&pair).await;
        send.write_all(&bytes[..cut]).await.expect("sent");
        send.finish().expect("open");
        let result = MessageReader::new(receive, MAX_TRANSFER_BYTES)
            .next::<PushReply>()
            .await;
        assert!(
            matches!(result, Err(FramingError::Truncated { .. })),
            "{cut}: {result:?}"
        );
    }
    let (mut send, mut receive) = stream(&pair).await;
    send.write_all(&[7; 10]).await.expect("sent");
    send.finish().expect("open");
    let mut buffer = BytesMut::new();
    let result = read_exact(&mut receive, 11, &mut buffer).await;
    assert_eq!(
        result,
        Err(FramingError::Truncated {
            expected: 11,
            received: 10
        })
    );
}

#[tokio::test]
async fn an_announced_length_over_the_limit_is_refused_at_the_head() {
    let pair = pair().await;
    let (mut send, receive) = stream(&pair).await;
    let mut head = u32::MAX.to_le_bytes().to_vec();
    head.extend_from_slice(&protocol::PROTOCOL_VERSION.to_le_bytes());
    send.write_all(&head).await.expect("sent");
    let result = MessageReader::new(receive, MAX_TRANSFER_BYTES)
        .next::<PushReply>()
        .await;
    let limit = MAX_TRANSFER_BYTES;
    assert_eq!(
        result,
        Err(CodecError::TooLong {
            length: u32::MAX as usize,
            limit
        }
        .into())
    );
    let (mut send, _receive) = stream(&pair).await;
    let result = write_message(&mut send, &refused(&"x".repeat(limit)), limit).await;
    assert!(
        matches!(result, Err(FramingError::Codec(CodecError::TooLong { .. }))),
        "{result:?}"
    );
}

#[tokio::test]
async fn a_reader_that_is_interrupted_loses_nothing() {
    let pair = pair().await;
    let (mut send, receive) = stream(&pair).await;
    let bytes = codec::encode(&refused("in pieces"), MAX_TRANSFER_BYTES).expect("encodes");
    let mut reader = MessageReader::new(receive, MAX_TRANSFER_BYTES);
    for piece in bytes.chunks(5) {
        // Nothing complete yet: the call is given up each time.
        let early = tokio::time::timeout(Duration::from_millis(20), reader.next::<PushReply>()).await;
        assert!(early.is_err(), "{early:?}");
        send.write_all(piece).await.expect("sent");
    }
    assert_eq!(soon("the message", reader.next()).await, Ok(Some(refused("in pieces"))));
}

#[tokio::test]
async fn a_lost_connection_is_told_from_a_reset() {
    let pair = pair().await;
    let (_send, receive) = stream(&pair).await;
    pair.dialled.connection.close(code::CLOSED, b"going home");
    let result = soon(
        "the loss",
        MessageReader::new(receive, MAX_TRANSFER_BYTES).next::<PushReply>(),
    )
    .await;
    let Err(FramingError::Connection { reason, silent: false }) = result else {
        panic!("{result:?}")
    };
    assert!(reason.contains("going home"), "{reason}");
}
