//! Schedules as scripts: one command a line, what it answers after `=>`.
//!
//! * `add P max M [hold] [first]`: a sequence with a prompt of P tokens. Answers its id.
//! * `reserve T grow G`: answers the number of the reservation and its blocks, or why not.
//! * `commit R max M`, `drop R`: what becomes of reservation R.
//! * `cancel I`, `release I`: of sequence I. Answers `yes` or `no`.
//! * `step`: for each planned sequence `id:first row-last row`, with `*` if it samples; then what happened.
//! * `stats`: block and sequence counts.

use super::{MODEL, prompt, spec};
use crate::engine::Engine;
use crate::event::EngineEvent;
use crate::fake::ScriptedRunner;
use crate::plan::SequenceId;
use crate::reservation::Reservation;
use crate::runner::{NoObserver, Runner};
use crate::sequence::OnFinish;

/// Runs `script` and compares the answers.
pub(super) fn check(engine: Engine, script: &str) {
    let limits = *engine.limits();
    let runner = ScriptedRunner::new(MODEL, limits.total_blocks, limits.block_tokens);
    let mut player = Player {
        engine,
        runner,
        reservations: Vec::new(),
    };
    // Columns may be aligned as one likes.
    let lines = || {
        let words = script
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        words.filter(|line| !line.is_empty())
    };
    let mut transcript = String::new();
    for line in lines() {
        let command = line.split("=>").next().unwrap_or_default().trim();
        let answer = player.execute(command);
        player.engine.check_invariants().unwrap();
        transcript.push_str(&format!("{command} => {answer}\n"));
    }
    let expected: String = lines().map(|line| format!("{line}\n")).collect();
    assert_eq!(transcript, expected, "the transcript:\n{transcript}");
}

struct Player {
    engine: Engine,
    runner: ScriptedRunner,
    reservations: Vec<Option<Reservation>>,
}

impl Player {
    fn execute(&mut self, command: &str) -> String {
        let words: Vec<&str> = command.split_whitespace().collect();
        let number = |index: usize| words[index].parse::<usize>().unwrap();
        let id = || SequenceId(number(1) as u64);
        match words[0] {
            "add" => {
                let mut spec = spec(prompt(1, number(1)), number(3) as u32);
                spec.on_finish = if words.contains(&"hold") {
                    OnFinish::Hold
                } else {
                    OnFinish::Release
                };
                spec.first_only = words.contains(&"first").then_some(1);
                self.engine
                    .add(spec)
                    .map_or_else(|error| error.to_string(), |id| id.0.to_string())
            }
            "reserve" => self.reserve(number(1), number(3)),
            "commit" => {
                let reservation = self.reservations[number(1)].take().unwrap();
                let mut spec = spec(prompt(2, reservation.tokens()), number(3) as u32);
                self.runner.write_kv(reservation.blocks(), &spec.token_ids).unwrap();
                spec.token_ids.push(1);
                let num_computed = spec.prompt_len;
                self.engine
                    .commit(reservation, spec, num_computed)
                    .unwrap()
                    .0
                    .to_string()
            }
            "drop" => {
                let reservation = self.reservations[number(1)].take().unwrap();
                yes(self.engine.release_reservation(reservation))
            }
            "cancel" => yes(self.engine.cancel(id())),
            "release" => yes(self.engine.release_held(id())),
            "step" => self.step(),
            "stats" => {
                let s = self.engine.stats();
                let (blocks, held) = (format!("free {} owned {}", s.free_blocks, s.owned_blocks), s.held);
                format!("{blocks} running {} waiting {} held {held}", s.running, s.waiting)
            }
            other => panic!("unknown command {other}"),
        }
    }

    fn reserve(&mut self, tokens: usize, growth: usize) -> String {
        match self.engine.reserve(tokens, growth) {
            Ok(reservation) => {
                let blocks: Vec<u32> = reservation.blocks().iter().map(|block| block.0).collect();
                self.reservations.push(Some(reservation));
                format!("{} {blocks:?}", self.reservations.len() - 1)
            }
            Err(error) => error.to_string(),
        }
    }

    fn step(&mut self) -> String {
        let Some(plan) = self.engine.plan() else {
            return "idle".to_owned();
        };
        let mut words: Vec<String> = Vec::new();
        for planned in &plan.sequences {
            let (first, rows) = (planned.start_position, planned.rows.len);
            let star = if planned.sample.is_some() { "*" } else { "" };
            words.push(format!("{}:{first}-{}{star}", planned.id.0, first + rows - 1));
        }
        let output = self.runner.run(plan, &mut NoObserver).unwrap();
        let mut events = Vec::new();
        self.engine.apply(&output, &mut events).unwrap();
        for event in events {
            match &event {
                EngineEvent::Token { finish: None, .. } => {}
                EngineEvent::Token {
                    id,
                    finish: Some(finish),
                    ..
                } => words.push(format!("end {} {finish:?}", id.0)),
                EngineEvent::Computed { id, .. } => words.push(format!("computed {}", id.0)),
                EngineEvent::BeamStep { id, .. } => words.push(format!("step of {}", id.0)),
                EngineEvent::Beams { id, beams } => words.push(format!("{} beams of {}", beams.len(), id.0)),
                EngineEvent::Preempted { id } => words.push(format!("preempted {}", id.0)),
                EngineEvent::Failed { id, .. } => words.push(format!("failed {}", id.0)),
            }
        }
        words.join(" ")
    }
}

fn yes(answer: bool) -> String {
    if answer { "yes" } else { "no" }.to_owned()
}
