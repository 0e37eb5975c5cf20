//! What one routing decision costs: 32 nodes, 100,000 cached blocks, a prompt of 1,024 tokens.
//!
//! `decide`: costs of all nodes and the choice. `look_up`: which node has how much of the prompt, once for a request as long
//! as no node reports a change. `names`: the prompt's hashes, once for a request.
#![allow(missing_docs, reason = "criterion's macros make functions")]

use std::hint::black_box;
use std::time::Duration;

use coordinator::core::nodes::{
    BreakerLimits, HealthLimits, Held, LinkId, Nodes, PrefillCredit, Shape, StepLimits, TextIdentity, Wanted,
};
use coordinator::core::routing::{LocalPrefill, Policy, Router};
use criterion::{Criterion, criterion_group, criterion_main};
use protocol::PROTOCOL_VERSION;
use protocol::control::{CacheChange, Hello, LoadReport, StepTimeModel};
use protocol::ids::{NodeId, RequestId, Role};
use protocol::kv::{KvDtype, KvLayout, ModelIdentity};
use protocol::prefix::block_hashes;
use protocol::window::Groups;
use runtime::clock::Clock;

const NODES: u64 = 32;
const CACHED_BLOCKS: u64 = 100_000;
const BLOCK_TOKENS: u32 = 16;
const PROMPT: usize = 1_024;

fn hello(role: Role, link: u64) -> Hello {
    Hello {
        protocol_version: PROTOCOL_VERSION,
        node: NodeId(format!("{role}-{link}")),
        boot: 1,
        role,
        address: "127.0.0.1:1".to_owned(),
        model: ModelIdentity {
            architecture: "llama".to_owned(),
            vocab_size: 1_000,
            tokenizer_hash: 1,
            weights_hash: 1,
            numerics: "x".to_owned(),
            adapters: Vec::new(),
        },
        layout: KvLayout {
            num_layers: 16,
            num_kv_heads: 8,
            head_dim: 64,
            block_tokens: BLOCK_TOKENS,
            dtype: KvDtype::F16,
            latent: false,
            groups: Groups::ONE,
        },
        total_blocks: 8_192,
        max_num_seqs: 256,
        max_seq_len: 8_192,
    }
}

/// Nodes with a load, and caches that hold `prompt` to different depths among much else.
fn cluster(prompt: &[u64]) -> Nodes {
    let text = TextIdentity {
        tokenizer_hash: 1,
        vocab_size: 1_000,
        adapters: Vec::new(),
    };
    let credit = PrefillCredit {
        window_tokens: 1_000_000,
        sharing_jobs: 2,
    };
    let limits = StepLimits {
        chunk_tokens: 256,
        mixed_tokens: 128,
        mixed_us: 25_000,
    };
    let health = HealthLimits {
        stall: Duration::from_secs(10),
        breaker: BreakerLimits {
            failures: 5,
            open: Duration::from_secs(1),
        },
    };
    let mut nodes = Nodes::new(text, credit, limits, health);
    for link in 0..NODES {
        let role = if link % 2 == 0 { Role::Prefill } else { Role::Decode };
        nodes.join(LinkId(link), role, hello(role, link));
        let report = LoadReport {
            sequence: 1,
            role,
            free_blocks: 8_192,
            queued_tokens: 100 * link,
            step_times: StepTimeModel {
                base_us: 2_000,
                row_ns: 300_000 + link,
                row_key_ns: 200,
                single_ns: 700_000,
                single_key_ns: 300,
            },
            ..LoadReport::default()
        };
        nodes.report(LinkId(link), report);
        let deep = prompt.len() * link as usize / NODES as usize;
        let others =
            (0..CACHED_BLOCKS / NODES - deep as u64).map(|n| (link << 32 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        nodes.cache_changed(
            LinkId(link),
            &CacheChange {
                sequence: 1,
                reset: true,
                added: prompt[..deep].iter().copied().chain(others).collect(),
                removed: Vec::new(),
            },
        );
    }
    nodes
}

fn decision(criterion: &mut Criterion) {
    let tokens: Vec<u32> = (0..PROMPT as u32).collect();
    let names = block_hashes(&tokens, BLOCK_TOKENS as usize, 0);
    let mut nodes = cluster(&names);
    let shape = Shape {
        prompt: PROMPT,
        held: Held::alike(1, 1),
        most_tokens: PROMPT + 256,
    };
    // Some work everywhere.
    let now = Clock.now();
    for link in 0..NODES {
        for request in 0..8 {
            let work = coordinator::core::nodes::Work::default();
            nodes.book(LinkId(link), RequestId(u128::from(link * 8 + request)), &shape, work);
        }
    }
    assert_eq!(nodes.prefixes().blocks() as u64, CACHED_BLOCKS / NODES * NODES);
    let cached = nodes.prefixes().matches(&names, nodes.kept().told());
    let wanted = Wanted {
        prefill: Some(&shape),
        decode: Some(&shape),
        most_steps: 256,
        cached: &cached,
        avoid: None,
    };
    let mut router = Router::new(Policy::PrefixAffinity, LocalPrefill::Never);
    let mut group = criterion.benchmark_group("decision");
    group
        .measurement_time(Duration::from_secs(2))
        .warm_up_time(Duration::from_millis(500));
    group.bench_function("decide", |bencher| {
        bencher.iter(|| {
            let options = nodes.options(black_box(now), &wanted);
            router.pair(&options).expect("there is room")
        });
    });
    group.bench_function("look_up", |bencher| {
        bencher.iter(|| nodes.prefixes().matches(black_box(&names), nodes.kept().told()));
    });
    group.bench_function("names", |bencher| {
        bencher.iter(|| nodes.block_names(black_box(&tokens), None));
    });
    group.finish();
}

criterion_group!(benches, decision);
criterion_main!(benches);
