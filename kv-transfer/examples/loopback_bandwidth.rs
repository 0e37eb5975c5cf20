//! How fast a handoff moves KV from a `Pusher` to a `Receiver` over QUIC on loopback: both ends complete, with mutual TLS,
//! checksums and a copy into a block pool. Each end has a runtime of one thread.
//!
//! `cargo run --release -p kv-transfer --example loopback_bandwidth [-- handoffs tokens]` (default: 40 handoffs, 1,024 tokens
//! of SmolLM2-135M in f16: 23.6 MB each)

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use config::{ClusterConfig, TransferConfig};
use kv_transfer::core::{Extent, Part};
use kv_transfer::pusher::Pusher;
use kv_transfer::receiver::{BlockSink, Grant, Receiver, ReservationTable};
use protocol::control::HandoffTarget;
use protocol::ids::{Epoch, NodeId, RequestId, Role, Ticket};
use protocol::kv::{Fingerprint, KvDtype, KvLayout};
use protocol::moved::HaveBlocks;
use protocol::transfer::{FrameHeader, PushCommit, PushOpen};
use protocol::window::Groups;
use runtime::authority::CertificateAuthority;
use runtime::clock::Clock;
use runtime::quic::QuicEndpoint;
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const LAYOUT: KvLayout = KvLayout {
    num_layers: 30,
    num_kv_heads: 3,
    head_dim: 64,
    block_tokens: 16,
    dtype: KvDtype::F16,
    latent: false,
    groups: Groups::ONE,
};
const FINGERPRINT: Fingerprint = Fingerprint(1);

/// A block pool that takes any ticket.
struct Pool {
    extent: Extent,
    bytes: Mutex<Vec<u8>>,
}

struct Table(Arc<Pool>);

impl BlockSink for Pool {
    fn extent(&self) -> Extent {
        self.extent
    }

    fn write(&self, header: &FrameHeader, payload: &[u8]) -> Result<(), String> {
        let mut bytes = self.bytes.lock().map_err(|e| e.to_string())?;
        let size = LAYOUT.layer_block_bytes();
        let row = header.blocks as usize * size;
        for (n, payload) in payload.chunks(row).enumerate() {
            let layer = header.first_layer as usize + n;
            let at = (layer * self.extent.blocks as usize + header.first_block as usize) * size;
            bytes[at..at + row].copy_from_slice(payload);
        }
        Ok(())
    }
}

impl ReservationTable for Table {
    fn open(&self, _: &PushOpen) -> Result<Grant, String> {
        let sink = Arc::clone(&self.0) as Arc<dyn BlockSink>;
        Ok(Grant {
            sink,
            revoked: CancellationToken::new(),
            deadline: Clock.now() + Duration::from_secs(60),
        })
    }

    fn committed(&self, _: &PushOpen, _: PushCommit) -> Result<(), String> {
        Ok(())
    }

    fn aborted(&self, _: &PushOpen) {}
}

async fn endpoint(
    ca: &CertificateAuthority,
    role: Role,
    transfer: &TransferConfig,
) -> Result<Arc<QuicEndpoint>, Failure> {
    let identity = ca.issue(role, &NodeId(role.to_string()))?.identity()?;
    let cluster = ClusterConfig::default();
    Ok(Arc::new(
        QuicEndpoint::bind(Arc::new(identity), "127.0.0.1:0", &cluster, transfer).await?,
    ))
}

fn one_thread() -> Result<tokio::runtime::Runtime, Failure> {
    Ok(tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?)
}

/// What a profile achieved.
struct Figures {
    cpu_seconds_per_gigabyte: f64,
    gigabytes_per_second: f64,
    median: Duration,
    fastest: Duration,
    datagram: u16,
    sent: u64,
    lost: u64,
}

fn measure(transfer: &TransferConfig, handoffs: u32, tokens: u32) -> Result<Figures, Failure> {
    let extent = Extent::of_one_group(LAYOUT.num_layers, 0, LAYOUT.blocks_for(tokens as usize) as u32);
    let ca = CertificateAuthority::generate()?;
    let (decode_runtime, prefill_runtime) = (one_thread()?, one_thread()?);
    let pool = vec![0; extent.parts() as usize * LAYOUT.layer_block_bytes()];
    let table = Arc::new(Table(Arc::new(Pool {
        extent,
        bytes: Mutex::new(pool),
    })));
    let receiver = Receiver::new(table, FINGERPRINT, LAYOUT, transfer);
    let decode = decode_runtime.block_on(endpoint(&ca, Role::Decode, transfer))?;
    let address = decode.local_addr()?.to_string();
    decode_runtime.spawn(async move {
        while let Some(link) = decode.accept().await {
            let receiver = receiver.clone();
            tokio::spawn(async move { receiver.serve(link).await });
        }
    });
    let transfer = transfer.clone();
    let task = prefill_runtime.spawn(async move { push_all(&ca, &transfer, address, extent, handoffs, tokens).await });
    prefill_runtime.block_on(task)?
}

async fn push_all(
    ca: &CertificateAuthority,
    transfer: &TransferConfig,
    address: String,
    extent: Extent,
    handoffs: u32,
    tokens: u32,
) -> Result<Figures, Failure> {
    let prefill = endpoint(ca, Role::Prefill, transfer).await?;
    let pusher = Pusher::new(Arc::clone(&prefill), LAYOUT, transfer)?;
    pusher.warm(NodeId(Role::Decode.to_string()), address.clone()).await?;
    // The search for the datagram size takes some round trips.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let layer_bytes = extent.blocks as usize * LAYOUT.layer_block_bytes();
    let layer: Bytes = (0..layer_bytes).map(|n| ((n * 31) >> 3) as u8).collect();
    let mut times = Vec::new();
    let cpu = cpu_seconds()?;
    for n in 0..handoffs {
        let target = HandoffTarget {
            node: NodeId(Role::Decode.to_string()),
            address: address.clone(),
            ticket: Ticket(n.into()),
            have_blocks: HaveBlocks::NONE,
        };
        let open = PushOpen {
            request: RequestId(n.into()),
            ticket: target.ticket,
            epoch: Epoch(1),
            fingerprint: FINGERPRINT,
        };
        let begin = Clock.now();
        let push = pusher.open(&target, open, extent, begin + Duration::from_secs(60))?;
        for first_layer in 0..extent.layers {
            let part = Part {
                first_layer,
                layers: 1,
                first_block: 0,
                blocks: extent.blocks,
            };
            push.staging().push(part, layer.clone()).await?;
        }
        push.commit(tokens, vec![0]).await?;
        times.push(since(begin));
    }
    let path = pusher
        .path(NodeId(Role::Decode.to_string()), address)
        .ok_or("the link is gone")?;
    let total: Duration = times.iter().sum();
    times.sort_unstable();
    let gigabytes = layer_bytes as f64 * f64::from(extent.layers) * f64::from(handoffs) / 1e9;
    Ok(Figures {
        gigabytes_per_second: gigabytes / total.as_secs_f64(),
        cpu_seconds_per_gigabyte: (cpu_seconds()? - cpu) / gigabytes,
        median: times[times.len() / 2],
        fastest: times[0],
        datagram: path.current_mtu,
        sent: path.sent_packets,
        lost: path.lost_packets,
    })
}

/// User and system time of this process so far, in seconds.
fn cpu_seconds() -> Result<f64, Failure> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    // Fields 14 and 15 of proc(5), counted from the one after the name, in ticks of 10 ms.
    let ticks: u64 = fields.skip(11).take(2).map(str::parse::<u64>).sum::<Result<_, _>>()?;
    Ok(ticks as f64 / 100.0)
}

fn since(begin: Instant) -> Duration {
    Clock.now().saturating_duration_since(begin)
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u32>());
    let handoffs = arguments.next().transpose()?.unwrap_or(40).max(1);
    let tokens = arguments.next().transpose()?.unwrap_or(1_024).max(1);
    let default = TransferConfig::default();
    let profiles = [
        ("network: 1,452 bytes, GSO", default.clone()),
        (
            "jumbo: 6,000 bytes, GSO",
            TransferConfig {
                datagram_bytes: 6_000,
                ..default.clone()
            },
        ),
        (
            "local: 65,000 bytes, no GSO",
            TransferConfig {
                datagram_bytes: 65_000,
                gso: false,
                ..default
            },
        ),
    ];
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{handoffs} handoffs of {tokens} tokens, {} bytes each",
        LAYOUT.block_bytes() * LAYOUT.blocks_for(tokens as usize)
    )?;
    for (name, transfer) in profiles {
        let figures = measure(&transfer, handoffs, tokens)?;
        let Figures {
            gigabytes_per_second: rate,
            cpu_seconds_per_gigabyte: cpu,
            median,
            fastest,
            datagram,
            sent,
            lost,
        } = figures;
        writeln!(
            out,
            "{name:28} {rate:5.2} GB/s, {cpu:4.2} CPU s/GB (both ends), handoff median {median:.1?}, fastest {fastest:.1?} \
             (datagrams of {datagram}, {lost} of {sent} lost)"
        )?;
    }
    Ok(())
}
