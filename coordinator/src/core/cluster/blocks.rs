//! Audits of the nodes' blocks, as far as they are the cluster's part: who is asked, and what is booked.

use std::time::Instant;

use protocol::blocks::{BlockAudit, JobKey, JobKind};
use protocol::control::CoordinatorMessage;
use protocol::ids::Epoch;

use super::{Action, Cluster};
use crate::core::block_audit::{AuditError, AuditId, Booked, Member, Question};
use crate::core::nodes::{LegId, LinkId};

impl Cluster {
    /// Asks all connected nodes whose their blocks are. Ends with [`Action::Audited`], within
    /// [`crate::core::block_audit::AUDIT_TIMEOUT`].
    ///
    /// # Errors
    /// Enough audits run.
    pub fn audit_blocks(&mut self, now: Instant, actions: &mut Vec<Action>) -> Result<AuditId, AuditError> {
        let members = self.nodes.members().map(|(link, hello, role)| Member {
            link,
            node: hello.node.0.clone(),
            role,
            booked: self.booked_on(link),
        });
        let (members, mut questions) = (members.collect(), Vec::new());
        let id = self.audits.begin(now, members, &mut questions)?;
        ask(&questions, actions);
        self.end_audits(actions);
        Ok(id)
    }

    /// The jobs that have been sent to a node and are not over.
    fn booked_on(&self, link: LinkId) -> Booked {
        let legs = self.nodes.legs_on(link).into_iter();
        let booked = legs.filter_map(|(id, _)| {
            let leg = self.nodes.leg(id).filter(|leg| leg.sent)?;
            Some((self.job_key(id)?, leg.booked_blocks()))
        });
        booked.collect()
    }

    /// By which name the node of a leg knows its job.
    fn job_key(&self, leg: LegId) -> Option<JobKey> {
        let id = self.nodes.leg(leg)?.request;
        let request = &self.requests.get(&id)?.request;
        let decodes = request.state().decode_leg() == Some(leg);
        Some(JobKey {
            request: id,
            epoch: Epoch(request.attempt()),
            kind: if decodes { JobKind::Decode } else { JobKind::Prefill },
        })
    }

    /// A node says whose its blocks are.
    pub(super) fn on_blocks(&mut self, now: Instant, link: LinkId, answer: BlockAudit, actions: &mut Vec<Action>) {
        if !self.audits.is_empty() {
            let booked = self.booked_on(link);
            self.audits.answered(now, link, answer, &booked);
            self.end_audits(actions);
        }
    }

    /// Goes on with the audits that run.
    pub(super) fn look_at_audits(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if self.audits.is_empty() {
            return;
        }
        let mut questions = Vec::new();
        let mut audits = std::mem::take(&mut self.audits);
        audits.look(now, |link| self.booked_on(link), &mut questions);
        self.audits = audits;
        ask(&questions, actions);
        self.end_audits(actions);
    }

    pub(super) fn end_audits(&mut self, actions: &mut Vec<Action>) {
        while let Some((audit, report)) = self.audits.take_ended() {
            let report = Box::new(report);
            actions.push(Action::Audited { audit, report });
        }
    }
}

fn ask(questions: &[Question], actions: &mut Vec<Action>) {
    actions.extend(questions.iter().map(|question| Action::Tell {
        link: question.link,
        message: CoordinatorMessage::ReportBlocks {
            number: question.number,
        },
    }));
}
