//! Handoffs on QUIC streams: one bidirectional stream each.

use bincode::{Decode, Encode};
use bytes::{Bytes, BytesMut};
use protocol::codec::MAX_TRANSFER_BYTES;
use quinn::{RecvStream, SendStream, VarInt};
use runtime::framing::{FramingError, MessageReader, MessageWriter};

use super::{Incoming, Outgoing};

/// The sending half of a stream.
#[derive(Debug)]
pub struct QuicOutgoing {
    writer: MessageWriter,
}

/// The reading half of a stream.
#[derive(Debug)]
pub struct QuicIncoming {
    reader: MessageReader,
}

/// Both halves of a bidirectional stream.
pub fn halves((send, receive): (SendStream, RecvStream)) -> (QuicOutgoing, QuicIncoming) {
    let writer = MessageWriter::new(send, MAX_TRANSFER_BYTES);
    let reader = MessageReader::new(receive, MAX_TRANSFER_BYTES);
    (QuicOutgoing { writer }, QuicIncoming { reader })
}

impl<M: Encode + Send + Sync> Outgoing<M> for QuicOutgoing {
    async fn send(&mut self, message: M, payload: Bytes) -> Result<(), FramingError> {
        self.writer.write_with_payload(&message, payload).await
    }

    fn finish(&mut self) -> Result<(), FramingError> {
        self.writer.finish()
    }

    fn reset(&mut self, code: VarInt) {
        self.writer.reset(code);
    }
}

impl<M: Decode<()> + Send> Incoming<M> for QuicIncoming {
    async fn next(&mut self) -> Result<Option<M>, FramingError> {
        self.reader.next().await
    }

    async fn payload(&mut self, length: usize, payload: &mut BytesMut) -> Result<(), FramingError> {
        self.reader.payload(length, payload).await
    }

    fn stop(&mut self, code: VarInt) {
        self.reader.stop(code);
    }
}
