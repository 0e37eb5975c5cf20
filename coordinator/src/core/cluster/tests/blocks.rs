//! Audits of the nodes' blocks: who is asked, and what the books say of jobs in every state.

use protocol::blocks::{BlockAudit, BlockOwner, OwnerKind};
use protocol::control::{CoordinatorMessage, JobEvent};

use super::bench::{Bench, STATES, at};
use crate::core::block_audit::{AUDIT_TIMEOUT, AuditReport};
use crate::core::cluster::{Action, Fact};
use crate::core::nodes::LinkId;

/// The questions, and the report if there is one.
fn told(actions: Vec<Action>) -> (Vec<(LinkId, u64)>, Option<AuditReport>) {
    let (mut questions, mut report) = (Vec::new(), None);
    for action in actions {
        if let Action::Tell {
            link,
            message: CoordinatorMessage::ReportBlocks { number },
        } = action
        {
            questions.push((link, number));
        } else if let Action::Audited { report: of, .. } = action {
            report = Some(*of);
        }
    }
    (questions, report)
}

fn begin(bench: &mut Bench) -> Vec<(LinkId, u64)> {
    let mut actions = Vec::new();
    bench
        .cluster
        .audit_blocks(bench.now, &mut actions)
        .expect("no other runs");
    bench.cluster.assert_consistent();
    told(actions).0
}

/// What a node would say that has the jobs that it was sent and that are not over.
fn of_jobs(bench: &Bench, node: &str, number: u64) -> BlockAudit {
    let owners = bench.on(node).into_iter().map(|leg| BlockOwner {
        job: Some(bench.job(leg).key()),
        elsewhere: None,
        kind: OwnerKind::Sequence,
        parts: 1,
        blocks: 2,
        counted_blocks: 2,
        age_ms: Some(5),
    });
    let owners: Vec<BlockOwner> = owners.collect();
    let owned = 2 * owners.len() as u32;
    BlockAudit {
        number,
        total_blocks: 100,
        free_blocks: 100 - owned,
        owned_blocks: owned,
        owners,
        ..BlockAudit::default()
    }
}

fn answer(bench: &mut Bench, link: LinkId, answer: BlockAudit) -> Option<AuditReport> {
    let answer = Box::new(answer);
    told(bench.fact(Fact::NodeBlocks { link, answer })).1
}

fn name_of(bench: &Bench, link: LinkId) -> String {
    bench.cluster.node_name(link).expect("connected").to_owned()
}

#[test]
fn books_and_nodes_agree_in_every_state() {
    for state in STATES {
        let mut bench = at(state);
        let questions = begin(&mut bench);
        let mut last = None;
        for (link, number) in questions {
            let said = of_jobs(&bench, &name_of(&bench, link), number);
            last = answer(&mut bench, link, said);
        }
        let report = last.unwrap_or_else(|| panic!("{state}: something is asked again"));
        assert!(report.complete && report.agrees, "{state}: {report:?}");
        let booked: u32 = report.nodes.iter().map(|node| node.owners.len() as u32).sum();
        assert_eq!(booked as usize, bench.open_legs().len(), "{state}");
    }
}

#[test]
fn a_job_that_the_node_does_not_have_is_missing_after_a_third_question() {
    let mut bench = at("decoding");
    let questions = begin(&mut bench);
    for (link, number) in questions {
        let mut said = of_jobs(&bench, &name_of(&bench, link), number);
        (said.free_blocks, said.owned_blocks) = (100, 0);
        said.owners.clear();
        assert_eq!(answer(&mut bench, link, said), None);
    }
    let mut again = || {
        let due = bench.cluster.poll_timeout(bench.now).expect("a further question");
        bench.now = due;
        let mut actions = Vec::new();
        bench.cluster.on_timeout(due, &mut actions);
        let (questions, _) = told(actions);
        let [(link, number)] = questions[..] else {
            panic!("{questions:?}")
        };
        assert_eq!(name_of(&bench, link), "d0");
        let said = BlockAudit {
            number,
            total_blocks: 100,
            free_blocks: 100,
            ..BlockAudit::default()
        };
        answer(&mut bench, link, said)
    };
    assert_eq!(again(), None);
    let report = again().expect("over");
    assert!(!report.agrees);
    let node = report.nodes.iter().find(|node| node.node == "d0").expect("it is there");
    let missing = &node.missing[0];
    assert_eq!(missing.request.as_deref(), Some("00000000000000000000000000000001"));
    assert_eq!((missing.attempt, missing.job), (Some(1), Some("decode")));
    // The request goes on as if nobody had asked.
    let decode = bench.started("d0");
    bench.token(decode, 2, 67);
    bench.token(decode, 3, 68);
    assert_eq!(bench.text(1), "ABCD");
    bench.assert_idle();
}

#[test]
fn an_audit_ends_without_nodes_without_answers_and_with_the_loss_of_a_node() {
    let mut bench = Bench::default();
    let mut actions = Vec::new();
    bench
        .cluster
        .audit_blocks(bench.now, &mut actions)
        .expect("no other runs");
    let (questions, report) = told(actions);
    assert!(questions.is_empty() && report.is_some_and(|report| report.complete && report.nodes.is_empty()));

    let mut bench = at("decoding");
    let began = bench.now;
    begin(&mut bench);
    let (_, report) = told(bench.lose("p0"));
    assert_eq!(report, None);
    bench.now = began + AUDIT_TIMEOUT;
    assert!(bench.cluster.poll_timeout(began).expect("a deadline") <= bench.now);
    let mut actions = Vec::new();
    bench.cluster.on_timeout(bench.now, &mut actions);
    let (_, report) = told(actions);
    let report = report.expect("its time is over");
    let silent: Vec<_> = report
        .nodes
        .iter()
        .map(|node| (node.node.as_str(), node.silent))
        .collect();
    assert_eq!(
        silent,
        [
            ("d0", Some("it did not answer in time")),
            ("p0", Some("its link was lost"))
        ]
    );
    // The decode job goes on.
    bench.event(bench.started("d0"), JobEvent::Finished);
}
