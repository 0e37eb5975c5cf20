//! What a seed is about: how large the cluster is, how much room its nodes have, and what goes wrong.

use std::time::Duration;

use config::{Config, LocalPrefillConfig, RoutingConfig};
use coordinator::core::cluster::ClusterSettings;
use coordinator::core::nodes::TextIdentity;
use coordinator::driver::settings;
use engine::limits::EngineLimits;
use protocol::ids::Role;
use protocol::window::Groups;

use crate::model::{ADAPTER, BLOCK_TOKENS, VOCAB, identity};
use crate::random::Random;

/// Longest sequence, prompt and output.
pub const MAX_SEQ_LEN: usize = 96;
/// A link without a sign of life is lost after this time.
pub const IDLE_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Longest wait of a pusher for an answer to its commit, and for the grant before it.
pub const COMMIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time between two looks of a node at whether its load is to be reported.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// How large the cluster is, and how much it is asked.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Prefill nodes.
    pub prefill: usize,
    /// Decode nodes.
    pub decode: usize,
    /// Calls of clients; some of them have several requests.
    pub calls: usize,
}

impl Default for Size {
    fn default() -> Self {
        Self {
            prefill: 4,
            decode: 4,
            calls: 48,
        }
    }
}

/// What goes wrong: numbers of incidents, and shares of a thousand.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Nodes that die and come back with a new boot.
    pub crashes: u64,
    /// Nodes that stop for up to some seconds.
    pub freezes: u64,
    /// Cuts between parts of the cluster.
    pub partitions: u64,
    /// Nodes whose steps take twenty times as long for some time.
    pub slow: u64,
    /// Nodes that drain, leave and come back.
    pub drains: u64,
    /// Nodes that an operator drains for some time.
    pub orders: u64,
    /// Times that an operator switches the role of a node that may serve any.
    pub switches: u64,
    /// Connections on which packets are lost: what is sent comes later.
    pub stalls: u64,
    /// Connections that end for no reason.
    pub breaks: u64,
    /// Of a thousand job events, how many break their stream.
    pub broken_streams: u64,
    /// Of a thousand frames, how many arrive damaged.
    pub damaged_frames: u64,
    /// Of a thousand frames, how many arrive twice.
    pub repeated_frames: u64,
    /// Of a thousand frames, how many come to another handoff as well.
    pub stray_frames: u64,
    /// Of a thousand reports, how many are lost.
    pub lost_reports: u64,
    /// Of a thousand reports, how many come again later.
    pub repeated_reports: u64,
    /// Of a thousand steps, how many fail.
    pub failing_steps: u64,
    /// Of a thousand frames, how many come when they will, before or behind those that were sent after them.
    pub late_frames: u64,
    /// Bits of KV that turn over: nothing that may happen, but what a simulation must notice.
    pub rot: u64,
    /// Cancels that nodes do not hear: nothing that may happen, but what an audit must notice.
    pub unheard: u64,
    /// Jobs that nodes forget without a word: the same.
    pub forgotten: u64,
    /// Of a thousand clients, how many leave before their answer is complete.
    pub leaving_clients: u64,
    /// Of a thousand clients, how many read too slowly.
    pub slow_clients: u64,
    /// Of a thousand pieces of KV, for how many there is no room in the staging memory at once.
    pub staging_full: u64,
}

/// See the head of the file.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Size of the cluster.
    pub size: Size,
    /// What goes wrong.
    pub faults: Faults,
    /// Within this time calls come in and faults happen.
    pub busy: Duration,
    /// Longest time that a message takes without a fault, in microseconds.
    pub latency_us: u64,
    /// Blocks of each node's pool, prefill nodes first.
    pub blocks: Vec<usize>,
    /// Most sequences of a node.
    pub max_num_seqs: usize,
    /// Most rows of a step, and most rows of one sequence in a step.
    pub chunk_tokens: usize,
    /// Size of a KV frame, in bytes.
    pub frame_bytes: usize,
    /// How nodes are chosen.
    pub routing: RoutingConfig,
    /// Whether decode nodes compute prompts.
    pub local_prefill: LocalPrefillConfig,
    /// Nodes that may serve any role, bit by bit.
    pub versatile: u64,
    /// Every node serves both roles from its start.
    pub all_both: bool,
    /// Nodes keep computed blocks.
    pub prefix_cache: bool,
    /// The groups of the model's layers; nodes let go of the blocks before their windows.
    pub groups: Groups,
    /// How far engines look ahead, in tokens: little leads to preemptions.
    pub horizon_tokens: usize,
    /// Longest time after which a client that leaves has left, in microseconds.
    pub leaves_within_us: u64,
    /// Events that may wait for a client.
    pub client_buffer: usize,
}

impl Scenario {
    /// The scenario of a seed: each kind of fault is there or not.
    pub fn of_seed(seed: u64, size: Size) -> Self {
        let mut random = Random::new(seed, "scenario");
        let random = &mut random;
        let scenario = Self::calm(seed, size);
        // In one seed of eight nothing goes wrong but that clients leave.
        let disturbed = random.below(8) > 0;
        let mut some = |per_mille: u64, range: std::ops::Range<u64>| {
            let there = random.chance(per_mille);
            let much = random.within(range);
            if there && disturbed { much } else { 0 }
        };
        let faults = Faults {
            crashes: some(500, 1..5),
            freezes: some(400, 1..4),
            partitions: some(400, 1..4),
            slow: some(400, 1..3),
            drains: some(250, 1..3),
            orders: some(250, 1..4),
            switches: some(500, 1..6),
            stalls: some(500, 1..12),
            breaks: some(300, 1..4),
            broken_streams: some(300, 1..15),
            damaged_frames: some(400, 1..60),
            repeated_frames: some(400, 1..60),
            stray_frames: some(400, 1..100),
            late_frames: some(300, 1..300),
            rot: 0,
            unheard: 0,
            forgotten: 0,
            lost_reports: some(400, 1..400),
            repeated_reports: some(400, 1..400),
            failing_steps: some(150, 1..4),
            staging_full: some(500, 1..500),
            leaving_clients: 0,
            slow_clients: 0,
        };
        let mut faults = faults;
        if random.chance(600) {
            faults.leaving_clients = random.within(1..300);
            faults.slow_clients = random.within(0..60);
        }
        Self { faults, ..scenario }
    }

    /// A scenario for late frames: one prefill and one decode node with few blocks, so that what one handoff gives back the
    /// next one gets; clients leave while KV is under way, and frames take up to ten round trips.
    pub fn late_frames(seed: u64) -> Self {
        let size = Size {
            prefill: 1,
            decode: 1,
            calls: 8,
        };
        let mut random = Random::new(seed, "late frames");
        let random = &mut random;
        Self {
            faults: Faults {
                late_frames: random.within(300..900),
                repeated_frames: random.within(0..300),
                stray_frames: random.within(0..500),
                damaged_frames: random.within(0..50),
                staging_full: random.within(0..300),
                leaving_clients: random.within(300..800),
                ..Faults::default()
            },
            busy: Duration::from_millis(random.within(50..400)),
            latency_us: random.within(1_000..10_000),
            blocks: vec![64, random.within(24..32) as usize],
            leaves_within_us: 100_000,
            frame_bytes: 64,
            local_prefill: LocalPrefillConfig::Never,
            ..Self::calm(seed, size)
        }
    }

    /// The scenario of a seed without faults.
    pub fn calm(seed: u64, size: Size) -> Self {
        let mut random = Random::new(seed, "size");
        let random = &mut random;
        let mut blocks: Vec<usize> = (0..size.prefill).map(|_| random.within(32..80) as usize).collect();
        // Decode pools hold few sequences.
        blocks.extend((0..size.decode).map(|_| random.within(24..52) as usize));
        let max_num_seqs = random.within(4..10) as usize;
        Self {
            size,
            faults: Faults::default(),
            busy: Duration::from_millis(random.within(200..6_000)),
            latency_us: random.within(200..20_000),
            blocks,
            max_num_seqs,
            chunk_tokens: random.within(10..40) as usize,
            frame_bytes: random.within(64..1_024) as usize,
            routing: *random.pick(&[
                RoutingConfig::PrefixAffinity,
                RoutingConfig::PrefixAffinity,
                RoutingConfig::LeastLoaded,
                RoutingConfig::RoundRobin,
            ]),
            local_prefill: *random.pick(&[
                LocalPrefillConfig::Never,
                LocalPrefillConfig::Auto,
                LocalPrefillConfig::Auto,
                LocalPrefillConfig::Always,
            ]),
            versatile: if random.chance(350) { random.next_u64() } else { 0 },
            all_both: false,
            prefix_cache: random.chance(850),
            horizon_tokens: *random.pick(&[1, 3, 256]),
            leaves_within_us: 600_000,
            client_buffer: random.within(12..64) as usize,
            groups: groups(random),
        }
    }

    /// What a node's certificate allows.
    pub fn certified(&self, index: usize) -> Role {
        if self.all_both || self.versatile >> (index % 64) & 1 == 1 {
            Role::Both
        } else {
            self.node(index).1
        }
    }

    /// What a node serves at its start.
    pub fn role(&self, index: usize) -> Role {
        match self.certified(index) {
            Role::Both if self.all_both || index.is_multiple_of(2) => Role::Both,
            _ => self.node(index).1,
        }
    }

    /// Name and role of a node.
    pub fn node(&self, index: usize) -> (String, Role) {
        match index.checked_sub(self.size.prefill) {
            None => (format!("p{index}"), Role::Prefill),
            Some(decode) => (format!("d{decode}"), Role::Decode),
        }
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.size.prefill + self.size.decode
    }

    /// Limits of a node's engine.
    pub fn engine(&self, index: usize) -> EngineLimits {
        EngineLimits {
            total_blocks: self.blocks[index] * self.groups.count(),
            block_tokens: BLOCK_TOKENS,
            max_num_seqs: self.max_num_seqs,
            max_batch_tokens: self.chunk_tokens.max(self.max_num_seqs),
            prefill_chunk_tokens: self.chunk_tokens,
            mixed_prefill_tokens: self.chunk_tokens.div_ceil(2),
            mixed_prefill_time: Duration::ZERO,
            // Where all layers have one, a window and a chunk fit into any pool.
            max_seq_len: match self.groups.slides(0) {
                true => MAX_SEQ_LEN,
                false => MAX_SEQ_LEN.min(self.blocks[index] * BLOCK_TOKENS),
            },
            prefix_cache: self.prefix_cache,
            groups: self.groups,
        }
    }

    /// The settings of the coordinator's core: production's, with short times.
    pub fn cluster(&self) -> ClusterSettings {
        let mut config = Config::default();
        config.engine.max_batch_tokens = self.chunk_tokens.max(self.max_num_seqs);
        config.engine.prefill_chunk_tokens = self.chunk_tokens;
        config.engine.mixed_prefill_tokens = self.chunk_tokens.div_ceil(2);
        let front = &mut config.coordinator;
        front.routing = self.routing;
        front.node_stall_ms = 3_000;
        front.local_prefill = self.local_prefill;
        front.queue_timeout_ms = 20_000;
        front.reserve_timeout_ms = 2_000;
        front.prefill_timeout_ms = 8_000;
        front.handoff_timeout_ms = 4_000;
        front.inter_token_timeout_ms = 4_000;
        let model = identity();
        let text = TextIdentity {
            tokenizer_hash: model.tokenizer_hash,
            vocab_size: VOCAB,
            adapters: vec![ADAPTER.to_owned()],
        };
        settings::cluster(&config, text)
    }
}

/// Most models see everything, some have a window, in all layers or in some.
fn groups(random: &mut Random) -> Groups {
    if !random.chance(350) {
        return Groups::ONE;
    }
    let window = random.within(2..40) as u32;
    match random.below(3) {
        0 => Groups::sliding(window),
        full => {
            let groups = Groups::mixed(full as u32, random.within(1..4) as u32, window);
            groups.with_spare(random.below(2) as u32, random.below(2) as u32)
        }
    }
}
