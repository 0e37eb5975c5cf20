//! Which node gets a job. One file per policy; a policy looks and never books: that is its caller's business.
//!
//! Costs are predicted microseconds, so that terms of different kinds add up honestly, and whole numbers, so that equal
//! nodes are equal.

pub mod least_loaded;
pub mod prefix_affinity;
pub mod round_robin;

use std::sync::Arc;

use serde::Serialize;

use super::nodes::{Beside, LinkId, Work};

/// How nodes are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Least predicted time for the request and those it delays; what nodes have cached counts.
    #[default]
    PrefixAffinity,
    /// Least work ahead, on each side by itself.
    LeastLoaded,
    /// One after the other.
    RoundRobin,
}

impl Policy {
    /// The policy's word in configuration and decision records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PrefixAffinity => "prefix_affinity",
            Self::LeastLoaded => "least_loaded",
            Self::RoundRobin => "round_robin",
        }
    }
}

/// A node that could take the job at hand, as a policy sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The node's link.
    #[serde(skip)]
    pub link: LinkId,
    /// Its name.
    pub name: Arc<str>,
    /// It serves both roles.
    pub both: bool,
    /// An earlier attempt of the same request failed there.
    pub avoided: bool,
    /// It has room for the job now.
    pub free: bool,
    /// Work ahead of the job, in thousandths of what the node takes at once.
    pub load: u64,
    /// Blocks that would be left.
    pub blocks_left: u64,
}

/// A prefill node, and what the prompt costs there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PrefillOption {
    /// The node.
    #[serde(flatten)]
    pub node: Candidate,
    /// Microseconds until it has computed what it was sent before.
    pub queue_us: u64,
    /// Tokens of the prompt that it has cached.
    pub cached_tokens: usize,
    /// What of the prompt it has to compute.
    pub work: Work,
}

/// A decode node, and what the request costs there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DecodeOption {
    /// The node.
    #[serde(flatten)]
    pub node: Candidate,
    /// Leading blocks of the prompt that it has cached.
    pub cached_blocks: usize,
    /// KV bytes of the prompt that it does not have.
    pub missing_bytes: u64,
    /// Microseconds that a reservation takes, there and back.
    pub grant_us: u64,
    /// Microseconds: what the sequences add to the steps of all that run there, and the steps they take part in.
    pub join_us: u64,
    /// Microseconds until it has computed the prompts it was sent before.
    pub queue_us: u64,
    /// It has so little to compute that it may be sent a prompt.
    pub has_credit: bool,
    /// What it has to compute if it computes the prompt itself.
    pub work: Work,
    /// How long that takes beside what it generates, and what that costs others.
    pub beside: Beside,
}

/// The nodes that could take a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Options {
    /// For the prompt.
    pub prefill: Vec<PrefillOption>,
    /// For the answer.
    pub decode: Vec<DecodeOption>,
    /// Microseconds that a decode node would wait for the KV behind the end of the prefill: for each prefill node one for
    /// each decode node.
    pub transfer_us: Vec<u64>,
}

impl PrefillOption {
    /// Microseconds until the first token.
    pub fn cost_us(&self) -> u64 {
        self.queue_us.saturating_add(self.work.us)
    }
}

impl DecodeOption {
    /// Microseconds, if the node computes the prompt itself.
    pub fn local_us(&self) -> u64 {
        let Beside { compute_us, damage_us } = self.beside;
        let prompt = self.queue_us.saturating_add(compute_us).saturating_add(damage_us);
        prompt.saturating_add(self.join_us)
    }
}

impl Options {
    /// What a prefill and a decode node are to each other.
    fn relation(&self, prefill: usize, decode: usize) -> Relation {
        let (from, to) = (&self.prefill[prefill].node, &self.decode[decode].node);
        if from.link == to.link {
            Relation::OneNode
        } else if from.both && to.both && from.name > to.name {
            Relation::AgainstTheOrder
        } else {
            Relation::Two
        }
    }

    /// Microseconds, if prefill node number `prefill` and decode node number `decode` share the work.
    pub fn pair_us(&self, prefill: usize, decode: usize) -> u64 {
        let prompt = self.prefill[prefill].cost_us();
        let transfer = self.transfer_us[prefill * self.decode.len() + decode];
        prompt
            .saturating_add(transfer)
            .saturating_add(self.decode[decode].grant_us)
            .saturating_add(self.decode[decode].join_us)
    }
}

/// What a prefill and a decode node are to each other.
///
/// Of two nodes that both serve both roles only the one whose name comes first hands over to the other. A handoff holds blocks
/// on the decode node while its prompt may have to wait for blocks on the prefill node, which other handoffs hold there; were
/// both directions allowed, two prompts could wait for each other's blocks, and nothing but a deadline would end it. So all
/// such waits lead towards earlier names, and none of them in a circle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    /// One hands over to the other.
    Two,
    /// It would hand over to itself.
    OneNode,
    /// It is the other one that may hand over to this one.
    AgainstTheOrder,
}

impl Options {
    /// Cost of the cheapest pair of two nodes with room on the decode node, whether or not the prefill node can begin now.
    pub fn remote_us(&self) -> Option<u64> {
        let free = || (0..self.decode.len()).filter(|number| self.decode[*number].node.free);
        let pairs = (0..self.prefill.len()).flat_map(|prefill| free().map(move |decode| (prefill, decode)));
        let two = pairs.filter(|(prefill, decode)| self.relation(*prefill, *decode) == Relation::Two);
        two.map(|(prefill, decode)| self.pair_us(prefill, decode)).min()
    }

    /// Cost on the cheapest decode node with room, if it computes the prompt itself.
    pub fn local_us(&self) -> Option<u64> {
        let free = self
            .decode
            .iter()
            .filter(|option| option.node.free && option.has_credit);
        free.map(DecodeOption::local_us).min()
    }
}

/// Whether decode nodes compute prompts themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LocalPrefill {
    /// Where that is predicted to cost less than a prefill node and the transfer, or no prefill node could take the job.
    #[default]
    Auto,
    /// Never, but for a node that serves both roles and would hand over to itself.
    Never,
    /// Every prompt.
    Always,
}

impl LocalPrefill {
    /// The word for it in configuration and decision records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Never => "never",
            Self::Always => "always",
        }
    }
}

/// What a request needs, and what there is for it.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// More than the first tokens are wanted.
    pub decode: bool,
    /// A prefill node takes jobs, though perhaps not now.
    pub prefill_serves: bool,
}

/// Where a request goes: numbers in the options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// To a prefill and a decode node.
    Pair(usize, usize),
    /// To a prefill node alone.
    Prefill(usize),
    /// To a decode node alone.
    Local(usize),
}

/// Chooses by the policy, and remembers what the policy needs to remember.
#[derive(Debug)]
pub struct Router {
    policy: Policy,
    local: LocalPrefill,
    /// The last request for which there was a choice was computed by a decode node.
    last_was_local: bool,
    turns: Turns,
}

/// Who was last, for taking turns.
#[derive(Debug, Default)]
struct Turns {
    prefill: Option<Arc<str>>,
    decode: Option<Arc<str>>,
}

impl Router {
    /// A router that has chosen nothing yet.
    pub fn new(policy: Policy, local: LocalPrefill) -> Self {
        Self {
            policy,
            local,
            last_was_local: false,
            turns: Turns::default(),
        }
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Whether decode nodes compute prompts themselves.
    pub fn local(&self) -> LocalPrefill {
        self.local
    }

    /// Where a request goes; `None` if it has to wait.
    pub fn place(&mut self, options: &Options, needs: &Needs) -> Option<Placed> {
        let local = match self.local {
            LocalPrefill::Never => false,
            // What no decode node could take a prefill node may do alone.
            LocalPrefill::Always => needs.decode || !options.decode.is_empty(),
            LocalPrefill::Auto => {
                !needs.prefill_serves || options.prefill.is_empty() || (needs.decode && self.local_is_cheaper(options))
            }
        };
        if local {
            return prefix_affinity::local(options).map(Placed::Local);
        }
        if !needs.decode {
            return self.prefill(options).map(Placed::Prefill);
        }
        let (prefill, decode) = self.pair(options)?;
        let here = &options.decode[decode];
        match options.relation(prefill, decode) {
            Relation::Two => Some(Placed::Pair(prefill, decode)),
            // What a node hands over to itself it would hold twice. Where there is no room for that, the reservation would
            // wait for the prompt, and the prompt for blocks that the reservation has.
            Relation::OneNode => Some(Placed::Local(decode)),
            // The decode node can compute the prompt as well, when it has little to compute.
            Relation::AgainstTheOrder => here.has_credit.then_some(Placed::Local(decode)),
        }
    }

    /// The other way than last time has to be a tenth cheaper: costs that are about equal would make it change all the time.
    fn local_is_cheaper(&mut self, options: &Options) -> bool {
        let Some(local) = options.local_us() else { return false };
        let Some(remote) = options.remote_us() else { return true };
        self.last_was_local = if self.last_was_local {
            local.saturating_mul(10) <= remote.saturating_mul(11)
        } else {
            local.saturating_mul(11) < remote.saturating_mul(10)
        };
        self.last_was_local
    }

    /// A prefill and a decode node, by their numbers in `options`; `None` if there is no room on one of the sides.
    pub fn pair(&mut self, options: &Options) -> Option<(usize, usize)> {
        let pair = match self.policy {
            Policy::PrefixAffinity => prefix_affinity::pair(options)?,
            Policy::LeastLoaded => {
                let prefill = least_loaded::choose(options.prefill.iter().map(|option| &option.node))?;
                (
                    prefill,
                    least_loaded::choose(options.decode.iter().map(|option| &option.node))?,
                )
            }
            Policy::RoundRobin => {
                let prefill = options.prefill.iter().map(|option| &option.node);
                let decode = options.decode.iter().map(|option| &option.node);
                (
                    round_robin::choose(prefill, self.turns.prefill.as_deref())?,
                    round_robin::choose(decode, self.turns.decode.as_deref())?,
                )
            }
        };
        self.turns.prefill = Some(options.prefill[pair.0].node.name.clone());
        self.turns.decode = Some(options.decode[pair.1].node.name.clone());
        Some(pair)
    }

    /// A prefill node for a prompt whose KV goes nowhere.
    pub fn prefill(&mut self, options: &Options) -> Option<usize> {
        let nodes = options.prefill.iter().map(|option| &option.node);
        let chosen = match self.policy {
            Policy::PrefixAffinity => prefix_affinity::prefill(options)?,
            Policy::LeastLoaded => least_loaded::choose(nodes)?,
            Policy::RoundRobin => round_robin::choose(nodes, self.turns.prefill.as_deref())?,
        };
        self.turns.prefill = Some(options.prefill[chosen].node.name.clone());
        Some(chosen)
    }

    /// A decode node that computes the prompt itself.
    pub fn decode(&mut self, options: &Options) -> Option<usize> {
        let nodes = options.decode.iter().map(|option| &option.node);
        let chosen = match self.policy {
            Policy::PrefixAffinity => prefix_affinity::decode(options)?,
            Policy::LeastLoaded => least_loaded::choose(nodes)?,
            Policy::RoundRobin => round_robin::choose(nodes, self.turns.decode.as_deref())?,
        };
        self.turns.decode = Some(options.decode[chosen].node.name.clone());
        Some(chosen)
    }
}
