//! The sampler against a naive one in double precision, its distribution, and hostile logits.

use model::sampler::random::{philox4x32, uniform};
use model::sampler::{Draw, SampleError, Sampler};
use protocol::sampling::{SampledToken, SamplingParams};

fn sampled() -> SamplingParams {
    SamplingParams {
        greedy: false,
        ..SamplingParams::greedy()
    }
}

fn draw<'a>(params: &'a SamplingParams, position: u32, history: &'a [u32], prompt_len: usize) -> Draw<'a> {
    Draw {
        params,
        further: 0,
        position,
        history,
        prompt_len,
        mask: None,
    }
}

/// Logits with about the spread of a language model's; `salt` picks the row.
fn row(vocab: usize, salt: u32) -> Vec<f32> {
    (0..vocab as u32)
        .map(|i| {
            let words = philox4x32([i, salt, 0, 99], [1, 2]);
            let sum: f64 = words.iter().map(|&w| f64::from(w) / f64::from(u32::MAX)).sum();
            ((sum - 2.0) * 6.0) as f32
        })
        .collect()
}

/// The remaining tokens with their probabilities, by the definitions and nothing else.
fn naive(logits: &[f32], params: &SamplingParams, history: &[u32], prompt_len: usize) -> Vec<(u32, f64)> {
    let mut z: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
    let output = history.get(prompt_len..).unwrap_or(&[]);
    for (t, z) in (0_u32..).zip(&mut z) {
        let count = output.iter().filter(|&&h| h == t).count() as f64;
        if history.contains(&t) {
            let r = f64::from(params.repetition_penalty);
            *z = if *z > 0.0 { *z / r } else { *z * r };
        }
        if count > 0.0 {
            *z -= f64::from(params.presence_penalty) + f64::from(params.frequency_penalty) * count;
        }
    }
    if params.greedy {
        let total = log_sum(&z);
        let mut best = 0;
        for t in 1..z.len() {
            if z[t] > z[best] {
                best = t;
            }
        }
        return vec![(best as u32, (z[best] - total).exp())];
    }
    z.iter_mut().for_each(|x| *x /= f64::from(params.temperature));
    let mut left: Vec<(u32, f64)> = z.iter().enumerate().map(|(t, &x)| (t as u32, x)).collect();
    left.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if params.top_k > 0 {
        left.truncate(params.top_k as usize);
    }
    let renormalise = |left: &mut Vec<(u32, f64)>| {
        let total = log_sum(&left.iter().map(|x| x.1).collect::<Vec<_>>());
        left.iter_mut().for_each(|x| x.1 -= total);
    };
    let cut = |left: &mut Vec<(u32, f64)>, mass: f32| {
        if mass < 1.0 {
            let mut sum = 0.0;
            let end = left.iter().position(|x| {
                sum += x.1.exp();
                sum >= f64::from(mass)
            });
            left.truncate(end.map_or(left.len(), |e| e + 1));
        }
    };
    renormalise(&mut left);
    cut(&mut left, params.top_p);
    renormalise(&mut left);
    if params.typical_p < 1.0 {
        let entropy: f64 = left.iter().map(|x| -x.1.exp() * x.1).sum();
        left.sort_by(|a, b| (-a.1 - entropy).abs().total_cmp(&(-b.1 - entropy).abs()));
        cut(&mut left, params.typical_p);
        renormalise(&mut left);
    }
    let best = left.iter().map(|x| x.1.exp()).fold(0.0, f64::max);
    left.retain(|x| x.1.exp() >= f64::from(params.min_p) * best);
    renormalise(&mut left);
    left.sort_by_key(|x| x.0);
    left.into_iter().map(|(t, lp)| (t, lp.exp())).collect()
}

fn log_sum(z: &[f64]) -> f64 {
    let max = z.iter().copied().fold(f64::MIN, f64::max);
    max + z.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}

/// The token that the inverse of the naive cumulative distribution gives, and whether `u` is close to a border.
fn invert(left: &[(u32, f64)], u: f64) -> (u32, bool) {
    let (mut sum, mut close) = (0.0, false);
    let mut chosen = None;
    for &(token, p) in left {
        sum += p;
        close |= (sum - u).abs() < 1e-5;
        if chosen.is_none() && sum > u {
            chosen = Some(token);
        }
    }
    (chosen.unwrap_or(left[left.len() - 1].0), close)
}

fn check(logits: &[f32], params: &SamplingParams, history: &[u32], prompt_len: usize, position: u32) -> bool {
    let out = Sampler::default()
        .sample(logits, &draw(params, position, history, prompt_len))
        .unwrap();
    let left = naive(logits, params, history, prompt_len);
    let raw =
        f64::from(logits[out.token as usize]) - log_sum(&logits.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    assert!(
        (f64::from(out.raw_logprob) - raw).abs() < 1e-4,
        "{params:?}: {out:?}, raw {raw}"
    );
    assert_eq!(out.position, position);
    let (expected, close) = invert(&left, uniform(params.seed, params.choice, position));
    if out.token != expected {
        assert!(
            close,
            "{params:?}: sampled {out:?}, expected {expected} of {} tokens",
            left.len()
        );
        return false;
    }
    let p = left.iter().find(|x| x.0 == out.token).unwrap().1;
    assert!(
        (f64::from(out.logprob) - p.ln()).abs() < 1e-3,
        "{params:?}: {out:?}, expected {}",
        p.ln()
    );
    true
}

#[test]
fn agrees_with_the_naive_sampler() {
    let mut exact = 0;
    let mut cases = 0;
    for i in 0..1_500_u32 {
        let pick =
            |what: u32, options: &[f32]| options[(philox4x32([i, what, 0, 7], [0, 0])[0] as usize) % options.len()];
        let vocab = [1, 3, 40, 600, 2_000][i as usize % 5];
        let params = SamplingParams {
            greedy: pick(0, &[0.0, 0.0, 0.0, 1.0]) > 0.0,
            temperature: pick(1, &[1.0, 1.0, 0.3, 1.7, 0.01]),
            top_k: pick(2, &[0.0, 0.0, 1.0, 5.0, 50.0, 1_000.0, 4_000_000.0]) as u32,
            top_p: pick(3, &[1.0, 1.0, 0.9, 0.5, 0.01, 0.999]),
            typical_p: pick(4, &[1.0, 1.0, 0.9, 0.3]),
            min_p: pick(5, &[0.0, 0.0, 0.05, 0.4]),
            repetition_penalty: pick(6, &[1.0, 1.0, 1.3, 0.8]),
            presence_penalty: pick(7, &[0.0, 0.0, 0.7, -1.0]),
            frequency_penalty: pick(8, &[0.0, 0.0, 0.4, -0.3]),
            seed: u64::from(i) << 20,
            choice: i % 3,
            top_logprobs: None,
            ..SamplingParams::greedy()
        };
        let history: Vec<u32> = (0..i % 30)
            .map(|t| philox4x32([t, i, 1, 1], [3, 4])[0] % vocab as u32)
            .collect();
        cases += 1;
        exact += u32::from(check(&row(vocab, i), &params, &history, history.len() / 2, i % 11));
    }
    eprintln!("{exact} of {cases} draws equal, the others on a border");
    assert!(exact * 100 >= cases * 98);
}

#[test]
fn frequencies_follow_the_distribution() {
    let logits = row(300, 5);
    for params in [
        SamplingParams {
            temperature: 1.3,
            seed: 11,
            ..sampled()
        },
        SamplingParams {
            temperature: 0.8,
            top_k: 20,
            seed: 12,
            ..sampled()
        },
        SamplingParams {
            top_p: 0.8,
            seed: 13,
            choice: 2,
            ..sampled()
        },
        SamplingParams {
            typical_p: 0.7,
            seed: 14,
            ..sampled()
        },
        SamplingParams {
            min_p: 0.1,
            temperature: 2.0,
            seed: 15,
            ..sampled()
        },
    ] {
        let left = naive(&logits, &params, &[], 0);
        let draws = 40_000_u32;
        let mut counts = vec![0_u32; logits.len()];
        let mut sampler = Sampler::default();
        for position in 0..draws {
            counts[sampler.sample(&logits, &draw(&params, position, &[], 0)).unwrap().token as usize] += 1;
        }
        assert_eq!(
            left.iter().map(|x| counts[x.0 as usize]).sum::<u32>(),
            draws,
            "tokens outside of the filter"
        );
        // Rare tokens share a bin, so that every expectation is above 20.
        let (mut chi, mut bins, mut rare) = (0.0, 0_u32, (0.0, 0.0));
        for &(token, p) in &left {
            let (expected, seen) = (p * f64::from(draws), f64::from(counts[token as usize]));
            if expected < 20.0 {
                rare = (rare.0 + expected, rare.1 + seen);
            } else {
                chi += (seen - expected).powi(2) / expected;
                bins += 1;
            }
        }
        if rare.0 > 0.0 {
            chi += (rare.1 - rare.0).powi(2) / rare.0;
            bins += 1;
        }
        // Mean of chi-square is the degrees of freedom, its variance twice that; 4 deviations, seeds are fixed.
        let freedom = f64::from(bins - 1);
        eprintln!("{params:?}: chi-square {chi:.1} at {freedom} degrees of freedom");
        assert!(chi < freedom + 4.0 * (2.0 * freedom).sqrt());
    }
}

#[test]
fn positions_choices_and_seeds_are_independent_of_order_and_company() {
    let rows: Vec<Vec<f32>> = (0..4).map(|i| row(1_000, i)).collect();
    let params = SamplingParams {
        temperature: 1.5,
        seed: 42,
        top_p: 0.95,
        ..sampled()
    };
    let one = |sampler: &mut Sampler, i: u32, choice: u32| -> SampledToken {
        let params = SamplingParams {
            choice,
            ..params.clone()
        };
        sampler
            .sample(&rows[i as usize % 4], &draw(&params, i, &[], 0))
            .unwrap()
    };
    let mut shared = Sampler::default();
    let forward: Vec<_> = (0..40).map(|i| one(&mut shared, i, i % 2)).collect();
    let mut backward: Vec<_> = (0..40).rev().map(|i| one(&mut Sampler::default(), i, i % 2)).collect();
    backward.reverse();
    assert_eq!(forward, backward);
    let other: Vec<_> = (0..40).map(|i| one(&mut shared, i, i % 2 + 1)).collect();
    assert_ne!(forward, other);
}

#[test]
fn a_filter_that_keeps_everything_changes_nothing() {
    let logits = row(5_000, 9);
    let plain = SamplingParams {
        temperature: 1.1,
        seed: 3,
        ..sampled()
    };
    let wide = SamplingParams {
        top_k: 5_000,
        ..plain.clone()
    };
    let wider = SamplingParams {
        top_k: 2_147_483_647,
        ..plain.clone()
    };
    for position in 0..200 {
        let token = |p| Sampler::default().sample(&logits, &draw(p, position, &[], 0)).unwrap();
        assert_eq!(token(&plain), token(&wide));
        assert_eq!(token(&plain), token(&wider));
    }
}

#[test]
fn tiny_temperatures_and_extreme_logits_stay_sound() {
    let mut sampler = Sampler::default();
    let mut logits = row(2_000, 1);
    logits[1_234] = 30.0;
    logits[77] = 29.999;
    for temperature in [1e-4, 1e-6, 1e-30, f32::MIN_POSITIVE] {
        for (top_k, top_p, typical_p) in [
            (0, 1.0, 1.0),
            (10, 1.0, 1.0),
            (0, 0.9, 1.0),
            (0, 1.0, 0.9),
            (50, 0.3, 0.2),
        ] {
            let params = SamplingParams {
                temperature,
                top_k,
                top_p,
                typical_p,
                seed: 8,
                ..sampled()
            };
            let out = sampler.sample(&logits, &draw(&params, 0, &[], 0)).unwrap();
            assert_eq!(out.token, 1_234, "{params:?}");
            assert!((-1e-3..=0.0).contains(&out.logprob), "{params:?}: {out:?}");
            assert!(out.raw_logprob.is_finite());
        }
    }
    let mut wild = vec![f32::MIN; 100];
    wild[3] = f32::MAX;
    wild[50] = f32::NEG_INFINITY;
    wild[51] = f32::MAX;
    for params in [
        sampled(),
        SamplingParams {
            top_k: 5,
            top_p: 0.9,
            typical_p: 0.9,
            min_p: 0.2,
            ..sampled()
        },
    ] {
        let params = SamplingParams {
            repetition_penalty: 0.5,
            presence_penalty: -3.0,
            ..params
        };
        let mut seen = [0; 2];
        for position in 0..100 {
            let out = sampler
                .sample(&wild, &draw(&params, position, &[3, 50, 51], 1))
                .unwrap();
            seen[usize::from(out.token == 51)] += 1;
            assert!(out.token == 3 || out.token == 51, "{out:?}");
            assert!((out.logprob + std::f32::consts::LN_2).abs() < 1e-6, "{out:?}");
        }
        assert!(seen[0] > 20 && seen[1] > 20, "{seen:?}");
    }
}

#[test]
fn greedy_takes_the_lowest_of_equals_and_ignores_the_filters() {
    let mut logits = row(3_000, 2);
    logits[2_000] = 20.0;
    logits[2_001] = 20.0;
    let params = SamplingParams {
        temperature: 0.1,
        top_k: 1,
        min_p: 1.0,
        seed: 5,
        ..SamplingParams::greedy()
    };
    let out = Sampler::default().sample(&logits, &draw(&params, 4, &[], 0)).unwrap();
    assert_eq!((out.token, out.position), (2_000, 4));
    assert_eq!(out.logprob, out.raw_logprob);
    let params = SamplingParams {
        repetition_penalty: 1.5,
        ..params
    };
    let out = Sampler::default()
        .sample(&logits, &draw(&params, 4, &[2_000], 1))
        .unwrap();
    assert_eq!(out.token, 2_001);
    assert!(out.logprob > out.raw_logprob);
}

#[test]
fn alternatives_are_the_best_of_the_unmodified_distribution() {
    let logits = row(1_000, 4);
    let mut order: Vec<u32> = (0..1_000).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    for n in [0_u8, 1, 5, 20, 255] {
        let params = SamplingParams {
            top_logprobs: Some(n),
            temperature: 0.7,
            repetition_penalty: 1.8,
            top_k: 3,
            ..sampled()
        };
        let out = Sampler::default()
            .sample(&logits, &draw(&params, 0, &[order[0]], 1))
            .unwrap();
        let tokens: Vec<u32> = out.top_logprobs.iter().map(|x| x.0).collect();
        assert_eq!(tokens, order[..usize::from(n)]);
        assert!(out.top_logprobs.is_sorted_by(|a, b| a.1 >= b.1));
        if let Some(own) = out.top_logprobs.iter().find(|x| x.0 == out.token) {
            assert_eq!(own.1, out.raw_logprob);
        }
    }
    let out = Sampler::default()
        .sample(&logits, &draw(&sampled(), 0, &[], 0))
        .unwrap();
    assert!(out.top_logprobs.is_empty());
}

#[test]
fn what_cannot_be_sampled_is_an_error() {
    let mut sampler = Sampler::default();
    let logits = row(64, 0);
    let nan = [&logits[..9], &[f32::NAN], &logits[10..]].concat();
    let params = sampled();
    assert_eq!(
        sampler.sample(&nan, &draw(&params, 0, &[], 0)),
        Err(SampleError::NotANumber { token: 9 })
    );
    let infinite = [&logits[..9], &[f32::INFINITY], &logits[10..]].concat();
    assert_eq!(
        sampler.sample(&infinite, &draw(&params, 0, &[], 0)),
        Err(SampleError::Infinite { token: 9 })
    );
    let nothing = [f32::NEG_INFINITY; 64];
    assert_eq!(
        sampler.sample(&nothing, &draw(&params, 0, &[], 0)),
        Err(SampleError::NoToken { vocab: 64 })
    );
    let bad = |change: fn(&mut SamplingParams)| {
        let mut params = sampled();
        change(&mut params);
        match Sampler::default().sample(&row(64, 0), &draw(&params, 0, &[], 0)) {
            Err(SampleError::Parameter { name, .. }) => name,
            other => panic!("{params:?} gave {other:?}"),
        }
    };
    assert_eq!(bad(|p| p.temperature = 0.0), "temperature");
    assert_eq!(bad(|p| p.temperature = f32::NAN), "temperature");
    assert_eq!(bad(|p| p.temperature = f32::INFINITY), "temperature");
    assert_eq!(bad(|p| p.top_p = 0.0), "top_p");
    assert_eq!(bad(|p| p.top_p = 1.5), "top_p");
    assert_eq!(bad(|p| p.typical_p = f32::NAN), "typical_p");
    assert_eq!(bad(|p| p.min_p = -0.1), "min_p");
    assert_eq!(bad(|p| p.repetition_penalty = 0.0), "repetition_penalty");
    assert_eq!(bad(|p| p.presence_penalty = f32::INFINITY), "presence_penalty");
    assert_eq!(bad(|p| p.frequency_penalty = f32::NAN), "frequency_penalty");
    let penalised = SamplingParams {
        presence_penalty: 1.0,
        ..sampled()
    };
    assert_eq!(
        sampler.sample(&logits, &draw(&penalised, 0, &[64], 0)),
        Err(SampleError::NoSuchToken { token: 64, vocab: 64 })
    );
    sampler.sample(&logits, &draw(&penalised, 0, &[63], 0)).unwrap();
}

#[test]
fn a_choice_with_a_seed_of_its_own_draws_as_the_only_one_with_that_seed() {
    let logits = row(300, 4);
    let params = SamplingParams {
        choice: 1,
        choice_seeds: vec![3, 4, u64::MAX],
        ..sampled()
    };
    let mut sampler = Sampler::default();
    for position in 0..50 {
        for (further, seed) in [(0, 4), (1, u64::MAX)] {
            let several = Draw {
                further,
                ..draw(&params, position, &[], 0)
            };
            let alone = SamplingParams { seed, ..sampled() };
            let expected = sampler.sample(&logits, &draw(&alone, position, &[], 0)).unwrap();
            assert_eq!(sampler.sample(&logits, &several).unwrap(), expected);
            let folded = params.of_choice(1 + further);
            assert_eq!(
                sampler.sample(&logits, &draw(&folded, position, &[], 0)).unwrap(),
                expected
            );
            assert!(folded.choice_seeds.is_empty());
        }
    }
}
