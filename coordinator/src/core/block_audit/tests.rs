//! Audits on a hand-held clock.

use std::time::{Duration, Instant};

use protocol::blocks::{BlockAudit, BlockOwner, JobKey, JobKind, OwnerKind};
use protocol::ids::{Epoch, NodeId, RequestId, Role};

use super::{AUDIT_TIMEOUT, AuditError, AuditReport, BlockAudits, Booked, CONFIRM_AFTER, MAX_AUDITS, Member, Question};
use crate::core::nodes::LinkId;
use crate::origin::origin;

fn key(request: u128) -> JobKey {
    JobKey {
        request: RequestId(request),
        epoch: Epoch(1),
        kind: JobKind::Decode,
    }
}

fn booked(requests: &[u128]) -> Booked {
    requests.iter().map(|request| (key(*request), 4)).collect()
}

fn owner(request: u128, blocks: u32, age_ms: u64) -> BlockOwner {
    BlockOwner {
        job: Some(key(request)),
        elsewhere: None,
        kind: OwnerKind::Sequence,
        parts: 1,
        blocks,
        counted_blocks: blocks,
        age_ms: Some(age_ms),
    }
}

/// Of a pool of 100 blocks, 10 of which are cached.
fn answer(owners: &[BlockOwner]) -> BlockAudit {
    let owned: u32 = owners.iter().map(|owner| owner.counted_blocks).sum();
    BlockAudit {
        total_blocks: 100,
        free_blocks: 90 - owned,
        cached_blocks: 10,
        owned_blocks: owned,
        owners: owners.to_vec(),
        ..BlockAudit::default()
    }
}

/// An audit of d0 and d1, and what is booked on both.
struct Bench {
    audits: BlockAudits,
    now: Instant,
    booked: [Booked; 2],
    questions: Vec<Question>,
}

impl Bench {
    fn new(requests: [&[u128]; 2]) -> Self {
        let mut bench = Self {
            audits: BlockAudits::default(),
            now: origin(),
            booked: requests.map(booked),
            questions: Vec::new(),
        };
        bench.begin().expect("the first audit");
        bench
    }

    fn begin(&mut self) -> Result<(), AuditError> {
        let members = self.booked.iter().enumerate().map(|(index, booked)| Member {
            link: LinkId(index as u64),
            node: format!("d{index}"),
            role: Role::Decode,
            booked: booked.clone(),
        });
        let members = members.collect();
        self.audits.begin(self.now, members, &mut self.questions).map(drop)
    }

    /// The node answers what it was asked last.
    fn say(&mut self, node: usize, owners: &[BlockOwner]) {
        self.say_all(node, answer(owners));
    }

    fn say_all(&mut self, node: usize, answer: BlockAudit) {
        let link = LinkId(node as u64);
        let asked = self.questions.iter().rev().find(|question| question.link == link);
        let number = asked.expect("it was asked").number;
        let booked = &self.booked[node];
        self.audits
            .answered(self.now, link, BlockAudit { number, ..answer }, booked);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let booked = self.booked.clone();
        let of = |link: LinkId| booked[link.0 as usize].clone();
        self.audits.look(self.now, of, &mut self.questions);
    }

    fn report(&mut self) -> Option<AuditReport> {
        self.audits.take_ended().map(|(_, report)| report)
    }
}

/// The requests of a list of jobs.
fn requests(jobs: &[super::JobReport]) -> Vec<String> {
    jobs.iter().filter_map(|job| job.request.clone()).collect()
}

fn id(request: u128) -> String {
    format!("{request:032x}")
}

#[test]
fn nodes_that_agree_are_asked_once() {
    let mut bench = Bench::new([&[1, 2], &[]]);
    assert_eq!(bench.questions.len(), 2);
    let theirs = BlockOwner {
        elsewhere: Some(NodeId("c1".to_owned())),
        ..owner(9, 3, 70_000)
    };
    bench.now += Duration::from_millis(30);
    bench.say(0, &[theirs, owner(1, 5, 1_500), owner(2, 0, 20)]);
    assert_eq!(bench.report(), None, "d1 has not answered");
    bench.say(1, &[]);
    let report = bench.report().expect("all have answered");
    assert!(report.complete && report.agrees, "{report:?}");
    assert_eq!(
        (report.blocks.total, report.blocks.owned, report.blocks.booked),
        (200, 8, 8)
    );
    assert_eq!(report.nodes[0].after_ms, Some(30));
    let ages: Vec<_> = report.by_age.iter().map(|sum| (sum.owners, sum.blocks)).collect();
    assert_eq!(ages, [(1, 0), (1, 5), (0, 0), (1, 3), (0, 0), (0, 0)]);
    let oldest = &report.by_request[0];
    assert_eq!((&oldest.request, oldest.coordinator.as_deref()), (&id(9), Some("c1")));
    let shown = &report.nodes[0].owners[1];
    assert_eq!(
        (shown.job.request.as_ref(), shown.job.booked_blocks),
        (Some(&id(1)), Some(4))
    );
    assert!(bench.audits.is_empty());
}

#[test]
fn what_only_one_side_knows_three_times_is_a_finding() {
    let mut bench = Bench::new([&[1, 2], &[3]]);
    bench.say(0, &[owner(1, 5, 10), owner(7, 2, 9_000)]);
    bench.say(1, &[owner(3, 1, 5)]);
    assert_eq!(bench.questions.len(), 2);
    bench.pass(CONFIRM_AFTER);
    assert_eq!(
        bench.questions.len(),
        3,
        "only who has something that is not known is asked again"
    );
    assert_eq!(bench.report(), None);
    // Twice may be a job that had not come yet, and then one whose end has not come yet.
    bench.say(0, &[owner(1, 5, 210), owner(7, 2, 9_200)]);
    bench.pass(CONFIRM_AFTER);
    assert_eq!((bench.questions.len(), bench.report()), (4, None));
    bench.say(0, &[owner(1, 5, 410), owner(7, 2, 9_400)]);
    let report = bench.report().expect("over");
    assert!(report.complete && !report.agrees);
    let node = &report.nodes[0];
    assert_eq!(
        (requests(&node.orphans), requests(&node.missing)),
        (vec![id(7)], vec![id(2)])
    );
    assert_eq!(
        (node.unconfirmed.len(), node.agrees, report.nodes[1].agrees),
        (0, false, true)
    );
}

#[test]
fn jobs_that_begin_and_end_meanwhile_are_none() {
    // Job 2 ends here before the node says that it has it, job 3 begins.
    let mut bench = Bench::new([&[1, 2], &[]]);
    bench.booked[0] = booked(&[1, 3]);
    bench.say(0, &[owner(1, 5, 10), owner(2, 5, 10)]);
    bench.say(1, &[]);
    let report = bench.report().expect("nothing is asked again");
    assert!(report.agrees, "{report:?}");

    // A cancel that is under way, and a job that is: the second answer shows neither.
    let mut bench = Bench::new([&[1, 2], &[]]);
    bench.say(1, &[]);
    bench.say(0, &[owner(1, 5, 10), owner(8, 5, 10)]);
    bench.pass(CONFIRM_AFTER);
    bench.say(0, &[owner(1, 5, 10), owner(2, 5, 10)]);
    let report = bench.report().expect("over");
    assert!(report.agrees && report.nodes[0].unconfirmed.is_empty(), "{report:?}");

    // Another job of that kind each time is no finding either.
    let mut bench = Bench::new([&[1], &[]]);
    bench.say(1, &[]);
    bench.say(0, &[owner(1, 5, 10), owner(8, 5, 10)]);
    bench.pass(CONFIRM_AFTER);
    bench.say(0, &[owner(1, 5, 10), owner(9, 5, 10)]);
    assert!(bench.report().expect("over").agrees);
}

#[test]
fn who_is_late_is_told_as_silent_and_who_was_not_asked_twice_as_unconfirmed() {
    let mut bench = Bench::new([&[1], &[2, 3]]);
    bench.pass(AUDIT_TIMEOUT - Duration::from_millis(1));
    bench.say(0, &[owner(5, 3, 1)]);
    assert_eq!(bench.audits.next_look(), Some(bench.now + Duration::from_millis(1)));
    bench.pass(Duration::from_millis(1));
    let report = bench.report().expect("its time is over");
    assert!(!report.complete && report.agrees);
    let (heard, silent) = (&report.nodes[0], &report.nodes[1]);
    assert_eq!(requests(&heard.unconfirmed), [id(1), id(5)]);
    assert_eq!(
        (silent.answered, silent.silent),
        (false, Some("it did not answer in time"))
    );
    assert_eq!((silent.blocks.booked, silent.blocks.total), (8, 0));
    // An answer that nobody waits for.
    bench.say(1, &[]);
    assert_eq!(bench.report(), None);

    let mut bench = Bench::new([&[], &[2]]);
    bench.say(0, &[]);
    bench.audits.lost(LinkId(1));
    let report = bench.report().expect("nobody is waited for");
    assert_eq!(report.nodes[1].silent, Some("its link was lost"));
}

#[test]
fn books_of_a_node_that_do_not_add_up_are_told() {
    let nameless = BlockOwner {
        job: None,
        age_ms: None,
        ..owner(1, 3, 0)
    };
    let whole = answer(&[owner(1, 5, 10)]);
    let cases = [
        (
            BlockAudit {
                free_blocks: 84,
                ..whole.clone()
            },
            "free + cached + owned is 99",
        ),
        (
            BlockAudit {
                unowned_blocks: 2,
                ..whole.clone()
            },
            "2 blocks are in use and nobody's",
        ),
        (
            BlockAudit {
                unbooked_blocks: 3,
                ..whole.clone()
            },
            "3 blocks have an owner",
        ),
        (
            BlockAudit {
                further_blocks: 1,
                further_owners: 1,
                ..whole.clone()
            },
            "the owners have 6 blocks, 5 are in use",
        ),
        (
            answer(&[owner(1, 5, 10), nameless]),
            "1 owners of 3 blocks belong to no job",
        ),
        (
            BlockAudit {
                problems: vec!["block 7 leaks".to_owned()],
                ..whole.clone()
            },
            "block 7 leaks",
        ),
    ];
    for (said, problem) in cases {
        let mut bench = Bench::new([&[1], &[]]);
        bench.say_all(0, said);
        bench.say(1, &[]);
        let report = bench.report().expect("over");
        let problems = &report.nodes[0].problems;
        assert!(
            problems.iter().any(|found| found.contains(problem)),
            "{problem}: {problems:?}"
        );
        assert!(!report.agrees && report.complete, "{problem}");
    }
    // What is not listed is not missed.
    let mut bench = Bench::new([&[1, 2], &[]]);
    bench.say(1, &[]);
    bench.say_all(
        0,
        BlockAudit {
            further_owners: 1,
            ..whole
        },
    );
    assert!(bench.report().expect("nothing is asked again").agrees);
}

#[test]
fn audits_that_run_side_by_side_do_not_mix_and_are_few() {
    let mut bench = Bench::new([&[1], &[]]);
    let first = bench.questions.clone();
    for _ in 1..MAX_AUDITS {
        bench.begin().expect("room");
    }
    assert_eq!(bench.begin(), Err(AuditError::TooMany));
    // The answers to the last one; the first one's come later.
    bench.say(0, &[owner(1, 5, 10)]);
    bench.say(1, &[]);
    assert!(bench.report().is_some());
    assert_eq!(bench.report(), None);
    for question in first {
        let owners = if question.link == LinkId(0) {
            vec![owner(1, 5, 10)]
        } else {
            Vec::new()
        };
        let said = BlockAudit {
            number: question.number,
            ..answer(&owners)
        };
        let booked = &bench.booked[question.link.0 as usize];
        bench.audits.answered(bench.now, question.link, said, booked);
    }
    assert!(bench.report().is_some_and(|report| report.complete && report.agrees));
    assert_eq!(bench.audits.len(), MAX_AUDITS - 2);
    bench.pass(AUDIT_TIMEOUT);
    while bench.report().is_some() {}
    assert!(bench.audits.is_empty());
}
