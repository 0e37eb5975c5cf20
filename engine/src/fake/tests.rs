//! The fake answers by what the blocks hold, and refuses wrong plans.

use std::sync::Arc;

use super::*;
use crate::runner::NoObserver;

const MODEL: ScriptedModel = ScriptedModel::new(1000);

fn span(start: u32, len: u32) -> Span {
    Span { start, len }
}

/// The last of five tokens, the first four of which are in block 3.
fn plan() -> StepPlan {
    let sample = SampleSpec {
        wanted: Wanted::Tokens(1),
        params: Arc::new(SamplingParams::greedy()),
        output_position: 1,
        history: Span::default(),
        prompt_len: 4,
    };
    let planned = PlannedSequence {
        id: SequenceId(0),
        owner: SequenceId(0),
        rows: span(0, 1),
        start_position: 4,
        adapter: None,
        blocks: span(0, 2),
        sample: Some(sample),
        targets: Span::default(),
        target_alternatives: 0,
    };
    StepPlan {
        step: 1,
        token_ids: vec![15],
        sequences: vec![planned],
        block_ids: vec![BlockId(3), BlockId(1)],
        ..StepPlan::default()
    }
}

fn run(kv: &[u32], change: impl FnOnce(&mut StepPlan)) -> Result<u32, String> {
    let mut runner = ScriptedRunner::new(MODEL, 4, 4);
    runner.write_kv(&[BlockId(3)], kv).unwrap();
    let mut plan = plan();
    change(&mut plan);
    let output = runner.run(&plan, &mut NoObserver).map_err(|error| error.to_string())?;
    Ok(output.sampled[0].1.token)
}

#[test]
fn the_token_depends_on_the_kv() {
    let token = MODEL
        .next_token(&[11, 12, 13, 14, 15], 4, &SamplingParams::greedy())
        .token;
    assert_eq!(run(&[11, 12, 13, 14], |_| ()), Ok(token));
    assert_ne!(run(&[11, 13, 12, 14], |_| ()), Ok(token));
    let lost = run(&[11, 12, 13], |_| ());
    assert_eq!(lost, Err("invalid plan: position 3 was never written".to_owned()));
}

#[test]
fn plans_that_break_the_contract_are_refused() {
    let refused = |change: fn(&mut StepPlan)| run(&[11, 12, 13, 14], change).unwrap_err();
    type Change = fn(&mut StepPlan);
    let cases: [(Change, &str); 8] = [
        (|p| p.step = 0, "step 0 has 1 sequences"),
        (|p| p.token_ids.push(1), "1 of 2 rows belong to a sequence"),
        (|p| p.sequences[0].rows = span(1, 1), "rows of sequence 0 start at 1"),
        (|p| p.block_ids[1] = BlockId(3), "block 3 is written and in two places"),
        (|p| p.block_ids[1] = BlockId(4), "block 4 is not in the pool"),
        (
            |p| p.sequences[0].blocks = span(0, 1),
            "position 4 lies beyond 1 blocks",
        ),
        (
            |p| p.sequences[0].blocks = span(1, 2),
            "blocks 1..+2 lie outside of an array of 2",
        ),
        (
            |p| p.sequences[0].sample.as_mut().unwrap().output_position = 2,
            "output position 2 after 5 tokens with a prompt of 4",
        ),
    ];
    for (change, reason) in cases {
        assert_eq!(refused(change), format!("invalid plan: {reason}"));
    }
    let no_history = refused(|p| {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            ..SamplingParams::greedy()
        };
        p.sequences[0].sample.as_mut().unwrap().params = Arc::new(params);
    });
    assert_eq!(no_history, "invalid plan: history has 0 tokens, not the 5 expected");
}
