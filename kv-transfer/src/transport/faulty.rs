//! A sending direction that misbehaves, reproducibly: what a frame suffers is a function of the seed, its number and how
//! often it has been sent, whatever the order of events.

use std::collections::HashMap;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use protocol::transfer::{FrameHeader, PushMessage};
use quinn::VarInt;
use runtime::framing::FramingError;
use runtime::quic::code;

use super::Outgoing;

/// How often frames suffer what, in percent. A frame suffers one fault at most, the first that strikes in this order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The stream is cut instead: reset.
    pub cut: u8,
    /// One bit of the payload is flipped.
    pub corrupt: u8,
    /// The frame is sent twice.
    pub duplicate: u8,
    /// The frame is sent after what follows it.
    pub reorder: u8,
    /// The frame is held back for [`delay_for`](Self::delay_for).
    pub delay: u8,
    /// Length of a delay.
    pub delay_for: Duration,
}

/// Wraps the prefill node's sending direction.
pub struct Faulty<O> {
    inner: O,
    faults: Faults,
    seed: u64,
    /// How often each frame has been sent.
    attempts: HashMap<u32, u32>,
    /// A frame that waits to be overtaken.
    held: Option<(PushMessage, Bytes)>,
    /// The commit has been sent: nothing may follow that could overtake a frame.
    last: bool,
}

impl<O> Faulty<O> {
    /// Faults on `inner`, drawn from `seed`.
    pub fn new(inner: O, faults: Faults, seed: u64) -> Self {
        Self {
            inner,
            faults,
            seed,
            attempts: HashMap::new(),
            held: None,
            last: false,
        }
    }
}

impl<O: Outgoing<PushMessage>> Faulty<O> {
    async fn strike(&mut self, header: FrameHeader, payload: Bytes) -> Result<(), FramingError> {
        let attempt = self.attempts.entry(header.number).or_default();
        *attempt += 1;
        let mut random = SplitMix(self.seed);
        random = SplitMix(random.next() ^ (u64::from(header.number) << 32 | u64::from(*attempt)));
        let message = PushMessage::Frame(header);
        if random.percent(self.faults.cut) {
            self.inner.reset(code::CANCELLED);
            return Err(FramingError::Connection {
                reason: "cut by the fault injector".to_owned(),
                silent: true,
            });
        }
        if random.percent(self.faults.corrupt) {
            let damaged = random.flip(&payload);
            return self.inner.send(message, damaged).await;
        }
        if random.percent(self.faults.duplicate) {
            self.inner.send(message.clone(), payload.clone()).await?;
            return self.inner.send(message, payload).await;
        }
        if random.percent(self.faults.reorder) && !self.last {
            self.held = Some((message, payload));
            return Ok(());
        }
        if random.percent(self.faults.delay) {
            tokio::time::sleep(self.faults.delay_for).await;
        }
        self.inner.send(message, payload).await
    }
}

impl<O: Outgoing<PushMessage>> Outgoing<PushMessage> for Faulty<O> {
    async fn send(&mut self, message: PushMessage, payload: Bytes) -> Result<(), FramingError> {
        let held = self.held.take();
        self.last |= matches!(message, PushMessage::Commit(_));
        match message {
            PushMessage::Frame(header) => self.strike(header, payload).await?,
            PushMessage::Open(_) | PushMessage::Commit(_) => self.inner.send(message, payload).await?,
        }
        if let Some((message, payload)) = held {
            self.inner.send(message, payload).await?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), FramingError> {
        self.inner.finish()
    }

    fn reset(&mut self, code: VarInt) {
        self.inner.reset(code);
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): small, seeded, good enough to choose faults.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn percent(&mut self, chance: u8) -> bool {
        self.next() % 100 < u64::from(chance)
    }

    fn flip(&mut self, payload: &Bytes) -> Bytes {
        let mut damaged = BytesMut::from(&payload[..]);
        if !damaged.is_empty() {
            let bit = self.next() % (damaged.len() as u64 * 8);
            damaged[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        damaged.freeze()
    }
}
