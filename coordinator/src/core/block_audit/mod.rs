//! Audits: every connected node is asked whose its blocks are, and what it says is compared with the books here.
//!
//! Life of a node's part:
//!
//! ```text
//! Asked -> Done                      all agrees
//!   |  `-> Pausing -> Asked -> Done  something does not: asked again, up to twice, as jobs begin and end while questions travel
//!   `-> Done                         it does not answer in time, or its link is lost
//! ```
//!
//! A job that only one side knows is a finding if it is so all three times. What was not asked a third time before the audit's
//! time was over is told as unconfirmed.

mod compare;
mod report;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use protocol::blocks::BlockAudit;
use protocol::ids::Role;
use thiserror::Error;

pub use self::compare::{Booked, Findings, compare};
pub use self::report::{AgeSum, AuditReport, JobReport, NodeReport, OwnerReport, RequestSum, Sums};
use super::nodes::LinkId;

/// Longest time that an audit takes.
pub const AUDIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause before a node is asked again.
const CONFIRM_AFTER: Duration = Duration::from_millis(200);
/// A finding is one that so many answers have. Two would not do: a short job may not have arrived when the first question is
/// answered, and have ended, with its last events on their way, when the second one is.
const ASKED_AT_MOST: u8 = 3;
/// Audits that may run side by side.
pub const MAX_AUDITS: usize = 4;

/// Name of an audit; never used twice by a coordinator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct AuditId(pub u64);

/// Why no audit begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum AuditError {
    /// Enough of them run.
    #[error("{MAX_AUDITS} audits of the blocks are running already; try again when one has ended")]
    TooMany,
}

/// A node that is to be asked.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its link.
    pub link: LinkId,
    /// Its name.
    pub node: String,
    /// What it does now.
    pub role: Role,
    /// What is booked on it.
    pub booked: Booked,
}

/// A question for a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Question {
    /// Its link.
    pub link: LinkId,
    /// Comes back with the answer.
    pub number: u64,
}

/// What a node said, and what was booked on it then.
#[derive(Debug)]
struct Answered {
    answer: BlockAudit,
    booked: Booked,
    findings: Findings,
    after: Duration,
}

#[derive(Debug)]
enum Stage {
    /// A question is out. `first`: what an earlier one led to.
    Asked {
        number: u64,
        then: Booked,
        first: Option<Box<Answered>>,
        /// How often it has been asked, this time included.
        asked: u8,
    },
    /// It will be asked again.
    Pausing {
        until: Instant,
        first: Box<Answered>,
        asked: u8,
    },
    /// What came of it.
    Done(Outcome),
}

#[derive(Debug)]
enum Outcome {
    /// What the node said last; findings that both answers have, and those that there was no time to confirm.
    Answered {
        last: Box<Answered>,
        confirmed: Findings,
        unconfirmed: Findings,
    },
    /// Why it did not answer.
    Silent(&'static str),
}

#[derive(Debug)]
struct Part {
    member: Member,
    stage: Stage,
}

#[derive(Debug)]
struct Audit {
    began: Instant,
    parts: Vec<Part>,
}

/// All audits that run.
#[derive(Debug, Default)]
pub struct BlockAudits {
    next_audit: u64,
    next_number: u64,
    open: BTreeMap<AuditId, Audit>,
}

impl BlockAudits {
    /// Begins an audit of these nodes; appends the questions.
    ///
    /// # Errors
    /// There are enough already.
    pub fn begin(
        &mut self,
        now: Instant,
        members: Vec<Member>,
        questions: &mut Vec<Question>,
    ) -> Result<AuditId, AuditError> {
        if self.open.len() >= MAX_AUDITS {
            return Err(AuditError::TooMany);
        }
        let id = AuditId(self.next_audit);
        self.next_audit += 1;
        let parts = members.into_iter().map(|member| {
            let (number, then) = (self.next_number, member.booked.clone());
            self.next_number += 1;
            let link = member.link;
            questions.push(Question { link, number });
            let stage = Stage::Asked {
                number,
                then,
                first: None,
                asked: 1,
            };
            Part { member, stage }
        });
        let parts = parts.collect();
        self.open.insert(id, Audit { began: now, parts });
        Ok(id)
    }

    /// A node answers; `booked` is what is booked on it now. An answer that nobody waits for is dropped.
    pub fn answered(&mut self, now: Instant, link: LinkId, answer: BlockAudit, booked: &Booked) {
        for audit in self.open.values_mut() {
            let after = now.saturating_duration_since(audit.began);
            let awaits = |part: &&mut Part| {
                part.member.link == link
                    && matches!(&part.stage, Stage::Asked { number, .. } if *number == answer.number)
            };
            if let Some(part) = audit.parts.iter_mut().find(awaits) {
                return part.take(now, answer, booked, after);
            }
        }
    }

    /// The link to a node is gone.
    pub fn lost(&mut self, link: LinkId) {
        let parts = self.open.values_mut().flat_map(|audit| &mut audit.parts);
        for part in parts.filter(|part| part.member.link == link) {
            part.give_up("its link was lost");
        }
    }

    /// When [`BlockAudits::look`] is due.
    pub fn next_look(&self) -> Option<Instant> {
        let pauses = |audit: &Audit| audit.parts.iter().filter_map(Part::pause).min();
        self.open
            .values()
            .flat_map(|audit| [Some(audit.began + AUDIT_TIMEOUT), pauses(audit)])
            .flatten()
            .min()
    }

    /// Asks again where that is due, and gives up what is late. `booked` tells what is booked on a link.
    pub fn look(&mut self, now: Instant, booked: impl Fn(LinkId) -> Booked, questions: &mut Vec<Question>) {
        for audit in self.open.values_mut() {
            let late = now >= audit.began + AUDIT_TIMEOUT;
            for part in &mut audit.parts {
                if late {
                    part.give_up("it did not answer in time");
                } else if part.pause().is_some_and(|until| until <= now) {
                    let (link, number) = (part.member.link, self.next_number);
                    self.next_number += 1;
                    part.ask_again(number, booked(link));
                    questions.push(Question { link, number });
                }
            }
        }
    }

    /// Takes out an audit that is over, if there is one.
    pub fn take_ended(&mut self) -> Option<(AuditId, AuditReport)> {
        let over = |audit: &Audit| audit.parts.iter().all(|part| matches!(part.stage, Stage::Done(_)));
        let id = self.open.iter().find(|(_, audit)| over(audit)).map(|(id, _)| *id)?;
        let audit = self.open.remove(&id)?;
        let nodes = audit.parts.into_iter().filter_map(|part| match part.stage {
            Stage::Done(outcome) => Some(NodeReport::new(part.member, outcome)),
            Stage::Asked { .. } | Stage::Pausing { .. } => None,
        });
        Some((id, AuditReport::new(nodes.collect())))
    }

    /// Audits that run.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// True if none runs.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

impl Part {
    fn pause(&self) -> Option<Instant> {
        match self.stage {
            Stage::Pausing { until, .. } => Some(until),
            Stage::Asked { .. } | Stage::Done(_) => None,
        }
    }

    fn take(&mut self, now: Instant, answer: BlockAudit, booked: &Booked, after: Duration) {
        let over = Stage::Done(Outcome::Silent(""));
        let Stage::Asked { then, first, asked, .. } = std::mem::replace(&mut self.stage, over) else {
            return;
        };
        let findings = compare(&answer, &then, booked);
        let mut last = Box::new(Answered {
            answer,
            booked: booked.clone(),
            findings,
            after,
        });
        self.stage = match first {
            None if !last.findings.is_empty() => Stage::Pausing {
                until: now + CONFIRM_AFTER,
                first: last,
                asked,
            },
            first => {
                let before = first.map(|first| first.findings).unwrap_or_default();
                let (confirmed, _) = last.findings.split(&before);
                if asked < ASKED_AT_MOST && !confirmed.is_empty() {
                    last.findings = confirmed;
                    self.stage = Stage::Pausing {
                        until: now + CONFIRM_AFTER,
                        first: last,
                        asked,
                    };
                    return;
                }
                Stage::Done(Outcome::Answered {
                    last,
                    confirmed,
                    unconfirmed: Findings::default(),
                })
            }
        };
    }

    fn ask_again(&mut self, number: u64, then: Booked) {
        let over = Stage::Done(Outcome::Silent(""));
        self.stage = match std::mem::replace(&mut self.stage, over) {
            Stage::Pausing { first, asked, .. } => Stage::Asked {
                number,
                then,
                first: Some(first),
                asked: asked.saturating_add(1),
            },
            other @ (Stage::Asked { .. } | Stage::Done(_)) => other,
        };
    }

    /// No further answer is waited for.
    fn give_up(&mut self, why: &'static str) {
        let silent = Stage::Done(Outcome::Silent(why));
        self.stage = match std::mem::replace(&mut self.stage, silent) {
            Stage::Asked { first: None, .. } => Stage::Done(Outcome::Silent(why)),
            Stage::Asked { first: Some(last), .. } | Stage::Pausing { first: last, .. } => {
                let unconfirmed = last.findings.clone();
                Stage::Done(Outcome::Answered {
                    last,
                    confirmed: Findings::default(),
                    unconfirmed,
                })
            }
            done @ Stage::Done(_) => done,
        };
    }
}
