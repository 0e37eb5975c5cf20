//! Who may join.

use protocol::PROTOCOL_VERSION;
use protocol::control::Hello;
use protocol::ids::{NodeId, Role};
use protocol::kv::{MAX_BLOCK_BYTES, differences};

use super::Nodes;

/// What a node's certificate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerName {
    /// Its role.
    pub role: Role,
    /// Its name.
    pub node: NodeId,
}

/// What a node must agree with the coordinator about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextIdentity {
    /// Hash of the coordinator's tokenizer.
    pub tokenizer_hash: u64,
    /// Size of the coordinator's vocabulary, in tokens.
    pub vocab_size: u32,
    /// Names of the adapters that clients may ask for: a node must have them.
    pub adapters: Vec<String>,
}

impl Nodes {
    /// Checks a node that wants to join. The error names what differs.
    pub fn check(&self, peer: &PeerName, hello: &Hello) -> Result<(), String> {
        let mut wrong = Vec::new();
        if hello.protocol_version != PROTOCOL_VERSION {
            return Err(format!(
                "protocol version: cluster has {PROTOCOL_VERSION}, node has {}",
                hello.protocol_version
            ));
        }
        if !peer.role.may_act_as(hello.role) || hello.node != peer.node {
            wrong.push(format!(
                "name: certificate says {} {}, node says {} {}",
                peer.role, peer.node, hello.role, hello.node
            ));
        }
        match hello.role {
            Role::Prefill | Role::Decode | Role::Both => {}
            Role::Coordinator => wrong.push("role: a coordinator cannot serve as a node".to_owned()),
        }
        if hello.model.tokenizer_hash != self.text.tokenizer_hash {
            wrong.push(format!(
                "tokenizer hash: coordinator has {:016x}, node has {:016x}",
                self.text.tokenizer_hash, hello.model.tokenizer_hash
            ));
        }
        if hello.model.vocab_size != self.text.vocab_size {
            wrong.push(format!(
                "vocabulary size: coordinator has {}, node has {}",
                self.text.vocab_size, hello.model.vocab_size
            ));
        }
        let missing = self
            .text
            .adapters
            .iter()
            .filter(|name| hello.model.adapter(name).is_none());
        wrong.extend(missing.map(|name| format!("adapters: coordinator has {name}, node has not")));
        let numbers = [
            ("total_blocks", hello.total_blocks),
            ("max_num_seqs", hello.max_num_seqs),
            ("max_seq_len", hello.max_seq_len),
            ("block_tokens", hello.layout.block_tokens),
        ];
        wrong.extend(
            numbers
                .iter()
                .filter(|(_, n)| *n == 0)
                .map(|(name, _)| format!("{name}: is 0, must be at least 1")),
        );
        wrong.extend(hello.layout.check().err());
        let block_bytes = hello.layout.block_bytes();
        if block_bytes > MAX_BLOCK_BYTES {
            wrong.push(format!(
                "KV layout: a block has {block_bytes} bytes, must have at most {MAX_BLOCK_BYTES}"
            ));
        }
        if hello.address.is_empty() {
            wrong.push("address: is empty, must be the host:port of the node's KV plane".to_owned());
        }
        wrong.extend(self.namesake(peer, hello));
        // The node that is being replaced by this one does not define what the cluster is.
        let other = self.nodes.values().find(|other| other.hello.node != hello.node);
        if let Some(other) = other {
            wrong.extend(differences(other.identity(), (&hello.model, &hello.layout)));
        }
        if wrong.is_empty() {
            Ok(())
        } else {
            Err(wrong.join("; "))
        }
    }

    /// Names are unique among all nodes: KV targets, certificates and metrics use them. A node that starts again replaces
    /// what is left of its former life; of two that run side by side the newer one stays, or they would replace each
    /// other for ever.
    fn namesake(&self, peer: &PeerName, hello: &Hello) -> Option<String> {
        let namesake = self.nodes.values().find(|other| other.hello.node == hello.node)?;
        let (node, role) = (&hello.node, namesake.certified);
        if role != peer.role {
            return Some(format!("name: {node} is the name of a connected {role} node"));
        }
        (namesake.hello.boot > hello.boot)
            .then(|| format!("name: a process {node} that was started later is connected; names must be unique"))
    }
}
