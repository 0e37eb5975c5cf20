//! What the node does now: its role, and whether operators want it to take no new jobs. One for all its coordinators, each
//! of which learns of a change from the next report.

use protocol::control::Job;
use protocol::ids::Role;
use tokio::sync::watch;

/// See the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Duty {
    /// What it serves.
    pub role: Role,
    /// An operator wants it to take nothing new.
    pub draining: bool,
}

/// The node's duty, and who may change it to what.
#[derive(Debug)]
pub struct Duties {
    now: watch::Sender<Duty>,
    /// What the certificate allows and the process can do.
    allowed: Role,
}

impl Duties {
    /// A node that begins as `role` and may become whatever `allowed` allows.
    pub fn new(role: Role, allowed: Role) -> Self {
        Self {
            now: watch::Sender::new(Duty { role, draining: false }),
            allowed,
        }
    }

    /// What the node does.
    pub fn now(&self) -> Duty {
        *self.now.borrow()
    }

    /// Follows changes.
    pub fn watch(&self) -> watch::Receiver<Duty> {
        self.now.subscribe()
    }

    /// New jobs are taken, or not.
    pub fn drain(&self, on: bool) {
        self.now
            .send_if_modified(|duty| std::mem::replace(&mut duty.draining, on) != on);
    }

    /// The node serves `role` from now on; false if it may not.
    pub fn set_role(&self, role: Role) -> bool {
        let may = role != Role::Coordinator && self.allowed.may_act_as(role);
        if may {
            self.now
                .send_if_modified(|duty| std::mem::replace(&mut duty.role, role) != role);
        }
        may
    }

    /// Why the node does not take `job`; `None` if it does.
    pub fn refusal(&self, job: &Job) -> Option<String> {
        let Duty { role, draining } = self.now();
        let wanted = match job {
            Job::Prefill(_) => Role::Prefill,
            Job::Decode(_) => Role::Decode,
        };
        if draining {
            return Some("the node is draining".to_owned());
        }
        (!role.may_act_as(wanted)).then(|| format!("the node serves as {role} now, not as {wanted}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_becomes_what_its_certificate_allows_and_nothing_else() {
        let fixed = Duties::new(Role::Decode, Role::Decode);
        assert!(fixed.set_role(Role::Decode) && !fixed.set_role(Role::Prefill) && !fixed.set_role(Role::Both));
        assert_eq!(fixed.now().role, Role::Decode);
        let free = Duties::new(Role::Both, Role::Both);
        let mut seen = free.watch();
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            assert!(free.set_role(role));
            assert!(seen.has_changed().expect("open"));
            assert_eq!(seen.borrow_and_update().role, role);
        }
        assert!(!free.set_role(Role::Coordinator));
        assert!(!seen.has_changed().expect("open"), "nothing has changed");
        free.drain(true);
        assert!(seen.has_changed().expect("open") && free.now().draining);
    }
}
