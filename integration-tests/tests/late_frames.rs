//! KV frames that come too late: the request they belong to has been given up, and its blocks are another's. Real links,
//! behind a relay that delays; the receiver, the reservations and the pool of a decode node. Whatever way a late frame takes,
//! not a byte of the blocks changes, and it is refused where that can be counted.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use config::{ClusterConfig, TransferConfig};
use decode_node::reservations::{Admission, Pending, Reservations};
use engine::plan::BlockId;
use integration_tests::random::Random;
use integration_tests::relay::{Relay, Weather};
use kv_transfer::core::{Extent, Frame, Part, ReceiveCounters, SendLimits, SendSession};
use kv_transfer::receiver::{Outcome, Receiver};
use kv_transfer::transport::quic::{QuicIncoming, QuicOutgoing, halves};
use kv_transfer::transport::{Incoming, Outgoing};
use model::kv_pool::KvPool;
use protocol::ids::{Epoch, NodeId, RequestId, Role, Ticket};
use protocol::kv::{Fingerprint, KvDtype, KvLayout};
use protocol::moved::HaveBlocks;
use protocol::transfer::{PushCommit, PushMessage, PushOpen, PushReply};
use protocol::window::Groups;
use runtime::authority::CertificateAuthority;
use runtime::clock::Clock;
use runtime::framing::FramingError;
use runtime::quic::{Alpn, Expect, Link, QuicEndpoint, code};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

const LAYOUT: KvLayout = KvLayout {
    num_layers: 3,
    num_kv_heads: 2,
    head_dim: 8,
    block_tokens: 4,
    dtype: KvDtype::F16,
    latent: false,
    groups: Groups::ONE,
};
const FINGERPRINT: Fingerprint = Fingerprint(7);
/// Blocks of the pool, and of a prompt.
const POOL: u32 = 24;
const BLOCKS: u32 = 6;
/// Far longer than anything here takes: a wait that reaches it has failed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pairs of nodes that are tried at the same time, and what each goes through.
const PAIRS: u64 = 4;
const TRIALS: u64 = 50;

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> Result<T> {
    let ended = timeout(PATIENCE, future).await;
    ended.with_context(|| format!("{what}: not within {PATIENCE:?}"))
}

/// A prefill node's link to a decode node, and that node's pool and doors.
struct Pair {
    link: Link,
    weather: Arc<Weather>,
    pool: Arc<KvPool>,
    table: Arc<Reservations>,
    /// How handoffs ended on the decode node.
    ended: mpsc::Receiver<(Outcome, ReceiveCounters)>,
    /// What each block of each layer must hold.
    right: Vec<Vec<Vec<u8>>>,
    random: Random,
    tickets: u64,
    _relay: Relay,
    _ends: [Arc<QuicEndpoint>; 2],
}

/// A handoff as the prefill node has it.
struct Handoff {
    open: PushOpen,
    frames: Vec<Frame>,
    commit: PushCommit,
}

async fn endpoint(ca: &CertificateAuthority, role: Role, name: &str) -> Result<Arc<QuicEndpoint>> {
    let identity = ca.issue(role, &NodeId(name.to_owned()))?.identity()?;
    let cluster = ClusterConfig {
        idle_timeout_ms: 30_000,
        connect_timeout_ms: 30_000,
        ..ClusterConfig::default()
    };
    let transfer = TransferConfig::default();
    Ok(Arc::new(
        QuicEndpoint::bind(Arc::new(identity), "127.0.0.1:0", &cluster, &transfer).await?,
    ))
}

impl Pair {
    async fn new(seed: u64) -> Result<Self> {
        let ca = CertificateAuthority::generate()?;
        let prefill = endpoint(&ca, Role::Prefill, "p0").await?;
        let decode = endpoint(&ca, Role::Decode, "d0").await?;
        let pool = Arc::new(KvPool::new(LAYOUT, POOL as usize)?);
        let table = Reservations::new(LAYOUT, FINGERPRINT);
        let receiver = Receiver::new(
            Arc::<Reservations>::clone(&table),
            FINGERPRINT,
            LAYOUT,
            &TransferConfig::default(),
        );
        let (sender, ended) = mpsc::channel(16);
        let accepting = Arc::clone(&decode);
        tokio::spawn(async move {
            while let Some(link) = accepting.accept().await {
                serve(receiver.clone(), link, sender.clone());
            }
        });
        let weather = Arc::new(Weather::default());
        let target = (Ipv4Addr::LOCALHOST, decode.local_addr()?.port()).into();
        let relay = Relay::start(target, Arc::clone(&weather), seed).await?;
        let expect = Expect {
            role: Role::Decode,
            node: None,
        };
        let link = prefill.connect(&relay.address.to_string(), Alpn::Kv, expect).await?;
        let zeros = vec![vec![0; LAYOUT.layer_block_bytes()]; POOL as usize];
        Ok(Self {
            link,
            weather,
            pool,
            table,
            ended,
            right: vec![zeros; LAYOUT.num_layers as usize],
            random: Random::new(seed),
            tickets: 0,
            _relay: relay,
            _ends: [prefill, decode],
        })
    }

    /// Different blocks for two prompts.
    fn blocks(&mut self) -> [Vec<BlockId>; 2] {
        let mut all: Vec<u32> = (0..POOL).collect();
        let mut draw = |_| {
            let at = self.random.below(all.len() as u64) as usize;
            BlockId(all.swap_remove(at))
        };
        [0, 1].map(|_| (0..BLOCKS).map(&mut draw).collect())
    }

    /// A handoff of random bytes under a new ticket, in frames of at most two blocks.
    fn handoff(&mut self, epoch: u32) -> Result<Handoff> {
        self.tickets += 1;
        let open = PushOpen {
            request: RequestId(u128::from(self.tickets)),
            ticket: Ticket(self.tickets),
            epoch: Epoch(epoch),
            fingerprint: FINGERPRINT,
        };
        let extent = Extent::of_one_group(LAYOUT.num_layers, 0, BLOCKS);
        let limits = SendLimits {
            frame_bytes: 2 * LAYOUT.layer_block_bytes(),
            max_resends: 0,
        };
        let mut session = SendSession::new(open.ticket, open.epoch, LAYOUT, extent, limits);
        for first_layer in 0..LAYOUT.num_layers {
            let part = Part {
                first_layer,
                layers: 1,
                first_block: 0,
                blocks: BLOCKS,
            };
            let bytes = BLOCKS as usize * LAYOUT.layer_block_bytes();
            let payload: Bytes = (0..bytes).map(|_| self.random.bits() as u8).collect();
            session.push(part, &payload)?;
        }
        let frames: Vec<Frame> = std::iter::from_fn(|| session.next_frame()).collect();
        ensure!(frames.len() == 9, "{} frames", frames.len());
        let commit = session.commit(BLOCKS * LAYOUT.block_tokens, vec![1])?;
        Ok(Handoff { open, frames, commit })
    }

    /// Opens the door for a handoff into `blocks`.
    fn admit(&self, handoff: &Handoff, blocks: &[BlockId]) -> Result<Pending> {
        let admission = Admission {
            ticket: handoff.open.ticket,
            request: handoff.open.request,
            epoch: handoff.open.epoch,
            num_tokens: BLOCKS * LAYOUT.block_tokens,
            have_blocks: HaveBlocks::NONE,
            deadline: Clock.now() + 2 * PATIENCE,
        };
        let writer = self.pool.writer(blocks.to_vec())?;
        self.table.admit(admission, writer).context("a new ticket")
    }

    /// Somebody else fills `blocks` of all layers: a sequence, as far as late frames are concerned.
    fn fill(&mut self, blocks: &[BlockId]) -> Result<()> {
        let bytes = (LAYOUT.num_layers * BLOCKS) as usize * LAYOUT.layer_block_bytes();
        let canary: Vec<u8> = (0..bytes).map(|_| self.random.bits() as u8).collect();
        self.pool
            .writer(blocks.to_vec())?
            .write(0, LAYOUT.num_layers, 0, BLOCKS, &canary)?;
        self.expect(0, blocks, &canary);
        Ok(())
    }

    /// From now on `blocks` hold `bytes`, from `layer` on.
    fn expect(&mut self, layer: u32, blocks: &[BlockId], bytes: &[u8]) {
        for (at, chunk) in bytes.chunks(LAYOUT.layer_block_bytes()).enumerate() {
            let (layer, block) = (layer as usize + at / blocks.len(), blocks[at % blocks.len()].0 as usize);
            self.right[layer][block] = chunk.to_vec();
        }
    }

    /// What `frame` leaves in the blocks of its reservation.
    fn expect_frame(&mut self, blocks: &[BlockId], frame: &Frame) {
        let header = &frame.header;
        let target = &blocks[header.first_block as usize..(header.first_block + header.blocks) as usize];
        self.expect(header.first_layer, target, &frame.payload);
    }

    /// Every byte of the pool is what it must be.
    fn check(&self) -> Result<()> {
        for (layer, blocks) in (0..).zip(&self.right) {
            for (block, right) in (0..).zip(blocks) {
                let bytes = self.pool.gather(layer..layer + 1, &[BlockId(block)])?;
                ensure!(bytes == right.as_slice(), "layer {layer}, block {block} has changed");
            }
        }
        Ok(())
    }

    async fn begin(&self, handoff: &Handoff) -> Result<Stream> {
        let (outgoing, incoming) = halves(self.link.connection.open_bi().await?);
        let mut stream = Stream { outgoing, incoming };
        let open = PushMessage::Open(handoff.open.clone());
        stream.outgoing.send(open, Bytes::new()).await?;
        Ok(stream)
    }

    /// A moment of at most some milliseconds, or none.
    async fn moment(&mut self) {
        let moment = self.random.below(4);
        if moment > 0 {
            sleep(Duration::from_millis(moment)).await;
        }
    }
}

/// Takes the handoffs of a link as [`Receiver::serve`] does, and tells what came of them.
fn serve(receiver: Receiver, link: Link, ended: mpsc::Sender<(Outcome, ReceiveCounters)>) {
    tokio::spawn(async move {
        while let Ok(stream) = link.connection.accept_bi().await {
            let (receiver, ended) = (receiver.clone(), ended.clone());
            tokio::spawn(async move {
                let (outgoing, incoming) = halves(stream);
                // Nobody listens once a trial has failed.
                let _heard = ended.send(receiver.handle(outgoing, incoming).await).await;
            });
        }
    });
}

/// A handoff's stream.
struct Stream {
    outgoing: QuicOutgoing,
    incoming: QuicIncoming,
}

impl Stream {
    async fn frame(&mut self, frame: &Frame) -> Result<(), FramingError> {
        let message = PushMessage::Frame(frame.header);
        self.outgoing.send(message, frame.payload.clone()).await
    }

    /// Waits until the receiver has written all frames below `wanted`.
    async fn received(&mut self, wanted: u32) -> Result<()> {
        loop {
            let reply: Option<PushReply> = soon("a receipt", self.incoming.next()).await??;
            match reply {
                Some(PushReply::Received { below }) if below >= wanted => return Ok(()),
                Some(PushReply::Received { .. }) => {}
                other => bail!("{other:?} instead of a receipt"),
            }
        }
    }

    /// The last word: an answer, or the code of a reset.
    async fn last_word(&mut self) -> Result<Result<PushReply, u64>> {
        loop {
            let reply: Result<Option<PushReply>, FramingError> = soon("the end", self.incoming.next()).await?;
            match reply {
                Ok(Some(PushReply::Received { .. })) => {}
                Ok(Some(last)) => return Ok(Ok(last)),
                Ok(None) => bail!("replies ended without a last word"),
                Err(FramingError::Reset { code }) => return Ok(Err(code)),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Late frames of one trial: those that went out on the stream of the request that was given up, behind a new opening of it,
/// and on the stream of another handoff.
#[derive(Debug, Default)]
struct Late {
    own: u64,
    reopened: u64,
    foreign: u64,
}

/// Gives a handoff up in its middle, its blocks to somebody else, and sends its frames afterwards.
async fn trial(pair: &mut Pair, number: u64) -> Result<Late> {
    pair.weather.delay(Duration::from_millis(pair.random.below(5)));
    let [blocks, others] = pair.blocks();
    let (victim, heir) = (pair.handoff(1)?, pair.handoff(5)?);
    let pending = pair.admit(&victim, &blocks)?;
    let mut stream = pair.begin(&victim).await?;
    let written = 1 + pair.random.below(7) as usize;
    for frame in &victim.frames[..written] {
        stream.frame(frame).await?;
    }
    stream.received(written as u32).await?;
    for frame in &victim.frames[..written] {
        pair.expect_frame(&blocks, frame);
    }
    drop(pending);
    // Either a sequence has the blocks now, or the next handoff writes them.
    let sequence = number.is_multiple_of(2);
    if sequence {
        pair.fill(&blocks)?;
    }
    let target = if sequence { others } else { blocks };
    let mut pending = pair.admit(&heir, &target)?;
    let late = send_late(pair, &victim, &mut stream, &heir).await?;
    for frame in &heir.frames {
        pair.expect_frame(&target, frame);
    }
    let committed = soon("the commit", pending.committed()).await?;
    ensure!(committed.as_ref() == Some(&heir.commit), "{committed:?}");
    pair.check()?;
    ensure!(pair.table.is_empty(), "reservations are left");
    Ok(late)
}

/// Sends all frames of `victim`, which is given up, wherever a frame can go, and those of `heir` in between.
async fn send_late(pair: &mut Pair, victim: &Handoff, stream: &mut Stream, heir: &Handoff) -> Result<Late> {
    let mut late = Late::default();
    // At once: nobody has told the prefill node yet.
    if stream.frame(&victim.frames[8]).await.is_ok() {
        late.own += 1;
    }
    let mut carrier = pair.begin(heir).await?;
    let mut again = pair.begin(victim).await?;
    let mut refused = 0;
    for (frame, own) in victim.frames.iter().zip(&heir.frames) {
        pair.moment().await;
        // Once the news has come, the stream takes no more.
        late.own += u64::from(stream.frame(frame).await.is_ok());
        if again.frame(frame).await.is_ok() {
            late.reopened += 1;
        }
        carrier.frame(frame).await?;
        let mut older = frame.clone();
        (older.header.ticket, older.header.epoch) = (heir.open.ticket, victim.open.epoch);
        carrier.frame(&older).await?;
        refused += 1;
        carrier.frame(own).await?;
        pair.moment().await;
    }
    // On a stream that is closed already these are no news either.
    let _gone = stream
        .outgoing
        .send(PushMessage::Commit(victim.commit.clone()), Bytes::new())
        .await;
    let _gone = again
        .outgoing
        .send(PushMessage::Commit(victim.commit.clone()), Bytes::new())
        .await;
    carrier
        .outgoing
        .send(PushMessage::Commit(heir.commit.clone()), Bytes::new())
        .await?;
    late.foreign = 2 * refused;

    // A frame that the receiver was just reading is refused by the pool itself.
    let word = stream.last_word().await?;
    ensure!(
        word == Err(code::REVOKED.into_inner())
            || matches!(&word, Ok(PushReply::Refused { reason }) if is_refused_write(reason)),
        "{word:?}"
    );
    let word = again.last_word().await?;
    ensure!(
        matches!(&word, Ok(PushReply::Refused { reason }) if is_closed(reason)),
        "{word:?}"
    );
    ensure!(carrier.last_word().await? == Ok(PushReply::Committed));
    let (mut revoked, mut reopened, mut committed) = (0, 0, None);
    for _ in 0..3 {
        let (outcome, counters) = soon("an outcome", pair.ended.recv()).await?.context("a receiver")?;
        match outcome {
            Outcome::Revoked => revoked += 1,
            Outcome::Refused(_) if counters == ReceiveCounters::default() => reopened += 1,
            Outcome::Refused(reason) if is_refused_write(&reason) => revoked += 1,
            Outcome::Committed => committed = Some(counters),
            other => bail!("{other:?}, {counters:?}"),
        }
    }
    let counters = committed.context("nothing was committed")?;
    ensure!((revoked, reopened) == (1, 1), "{revoked} revoked, {reopened} refused");
    let counted = (counters.wrong_ticket, counters.wrong_epoch, counters.frames);
    ensure!(counted == (refused, refused, heir.frames.len() as u64), "{counters:?}");
    Ok(late)
}

/// The blocks of a frame were not the handoff's any more when it was to be written.
fn is_refused_write(reason: &str) -> bool {
    reason.contains("cannot write frame") && reason.contains("revoked")
}

/// The ticket is unknown, or its first stream is still there.
fn is_closed(reason: &str) -> bool {
    reason.contains("is not open") || reason.contains("is being pushed by another stream")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_frames_change_nothing_of_whoever_has_the_blocks_now() -> Result<()> {
    let mut pairs = JoinSet::new();
    for seed in 0..PAIRS {
        pairs.spawn(async move {
            let mut pair = Pair::new(seed).await?;
            let mut all = Late::default();
            for number in 0..TRIALS {
                let late = trial(&mut pair, number).await;
                let late = late.with_context(|| format!("pair {seed}, trial {number}"))?;
                ensure!(late.foreign > 0, "no frame came late");
                all.own += late.own;
                all.reopened += late.reopened;
                all.foreign += late.foreign;
            }
            anyhow::Ok(all)
        });
    }
    while let Some(late) = pairs.join_next().await {
        let late = late??;
        eprintln!("{TRIALS} trials: {late:?}");
        ensure!(late.own > 0 && late.reopened > 0, "{late:?}");
    }
    Ok(())
}
