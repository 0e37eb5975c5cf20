//! The grammar masks of a step, computed on a thread of their own while the step itself is computed: what may follow
//! depends on the tokens so far, which are known when a step begins.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use engine::plan::{SequenceId, StepPlan};
use grammar::{GrammarState, Grammars, TokenMask};
use protocol::sampling::SamplingParams;

/// Steps after which a state that was not used is dropped; its sequence has most likely ended. Nothing but work is lost.
const IDLE_STEPS: u64 = 256;
/// Grammars recurse with their nesting.
const STACK_BYTES: usize = 64 << 20;
/// Tasks and answers under way; a step waits for its own, so nothing is held up for long.
const QUEUE: usize = 64;

/// What a sequence may go on with, or why it cannot.
pub(crate) type Mask = Result<TokenMask, String>;

/// The masks of a step.
#[derive(Default)]
pub(crate) struct Answers(HashMap<SequenceId, Mask>);

impl Answers {
    /// The mask of a sequence; `None` if it has no grammar.
    pub(crate) fn of(&self, id: SequenceId) -> Option<&Mask> {
        self.0.get(&id)
    }
}

struct Task {
    id: SequenceId,
    params: Arc<SamplingParams>,
    output: Vec<u32>,
    state: Option<GrammarState>,
}

struct Done {
    id: SequenceId,
    state: Option<GrammarState>,
    answer: Mask,
}

struct Worker {
    tasks: SyncSender<Vec<Task>>,
    done: Receiver<Vec<Done>>,
}

/// See the head of the file. Owned by the compute thread.
pub(crate) struct Masks {
    grammars: Option<Grammars>,
    worker: Option<Worker>,
    states: HashMap<SequenceId, (GrammarState, u64)>,
    answers: Answers,
    step: u64,
    /// Sequences whose answers have not come.
    pending: Vec<SequenceId>,
}

impl Masks {
    /// Without `grammars` every sequence with a grammar fails.
    pub(crate) fn new(grammars: Option<Grammars>) -> Self {
        Self {
            grammars,
            worker: None,
            states: HashMap::new(),
            answers: Answers::default(),
            step: 0,
            pending: Vec::new(),
        }
    }

    /// Begins to compute the masks of a plan that has been checked.
    pub(crate) fn begin(&mut self, plan: &StepPlan) {
        self.step += 1;
        self.answers.0.clear();
        self.pending.clear();
        if !self.states.is_empty() && self.step.is_multiple_of(IDLE_STEPS) {
            let oldest = self.step - IDLE_STEPS;
            self.states.retain(|_, (_, used)| *used >= oldest);
        }
        let mut tasks = Vec::new();
        for planned in &plan.sequences {
            let Some(sample) = planned.sample.as_ref().filter(|sample| sample.params.grammar.is_some()) else {
                continue;
            };
            let history = &plan.history[sample.history.range()];
            tasks.push(Task {
                id: planned.id,
                params: Arc::clone(&sample.params),
                output: history[sample.prompt_len as usize..].to_vec(),
                state: self.states.remove(&planned.id).map(|(state, _)| state),
            });
        }
        if tasks.is_empty() {
            return;
        }
        self.pending.extend(tasks.iter().map(|task| task.id));
        let sent = self.worker().is_some_and(|worker| worker.tasks.send(tasks).is_ok());
        if !sent {
            self.give_up();
        }
    }

    /// Waits for the masks that [`Masks::begin`] asked for.
    pub(crate) fn finish(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let Some(done) = self.worker.as_ref().and_then(|worker| worker.done.recv().ok()) else {
            self.give_up();
            return;
        };
        self.pending.clear();
        for Done { id, state, answer } in done {
            if let Some(state) = state.filter(|_| answer.is_ok()) {
                self.states.insert(id, (state, self.step));
            }
            self.answers.0.insert(id, answer);
        }
    }

    /// The masks that [`Masks::finish`] waited for.
    pub(crate) fn answers(&self) -> &Answers {
        &self.answers
    }

    fn worker(&mut self) -> Option<&Worker> {
        if self.worker.is_none() {
            let grammars = self.grammars.clone()?;
            let (tasks, inbox) = sync_channel::<Vec<Task>>(QUEUE);
            let (outbox, done) = sync_channel(QUEUE);
            let work = move || {
                while let Ok(tasks) = inbox.recv() {
                    let done = tasks.into_iter().map(|task| answer(&grammars, task)).collect();
                    if outbox.send(done).is_err() {
                        return;
                    }
                }
            };
            let name = "baton-grammar".to_owned();
            match thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(work) {
                // It ends with the channel.
                Ok(_) => self.worker = Some(Worker { tasks, done }),
                Err(error) => tracing::error!(%error, "no thread for grammars"),
            }
        }
        self.worker.as_ref()
    }

    fn give_up(&mut self) {
        self.worker = None;
        let reason = match self.grammars {
            Some(_) => "the thread that computes grammars has ended",
            None => "this node has no vocabulary for grammars",
        };
        for id in self.pending.drain(..) {
            self.answers.0.insert(id, Err(reason.to_owned()));
        }
    }
}

fn answer(grammars: &Grammars, task: Task) -> Done {
    let Task {
        id,
        params,
        output,
        state,
    } = task;
    let Some(grammar) = &params.grammar else {
        let answer = Err("a sequence without a grammar was asked for its mask".to_owned());
        return Done {
            id,
            state: None,
            answer,
        };
    };
    // Ids are never used twice, but a state of another grammar must not be gone on with in any case.
    let kept = state.filter(|state| state.grammar() == grammar);
    let started = kept.map_or_else(|| grammars.start(grammar), Ok);
    match started {
        Ok(mut state) => {
            let answer = state.mask(&output).map_err(|error| error.to_string());
            Done {
                id,
                state: Some(state),
                answer,
            }
        }
        Err(error) => Done {
            id,
            state: None,
            answer: Err(error.to_string()),
        },
    }
}
