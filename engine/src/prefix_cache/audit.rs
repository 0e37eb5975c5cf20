//! The audit of the index.

use std::cmp::Reverse;

use super::{NodeId, PrefixCache};
use crate::plan::BlockId;

impl PrefixCache {
    /// Compares the index with the reference counts, by block. `whole`, of a group of layers: sequences
    /// refer to all their blocks, so a block has no fewer references than one that continues it.
    pub(crate) fn audit(&self, ref_counts: &[u32], whole: impl Fn(u32) -> bool, problems: &mut Vec<String>) {
        let mut children = vec![0; self.nodes.len()];
        let (mut idle, mut nodes) = (0, 0);
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let id = NodeId(index as u32);
            nodes += 1;
            idle += usize::from(node.idle);
            if self.index.get(&node.name) != Some(&id) {
                problems.push(format!("node {index} is not found under its name"));
            }
            let references = node.block.map(|block| ref_counts[block.0 as usize]);
            if node.idle != (references == Some(0)) {
                problems.push(format!(
                    "node {index} has {references:?} references, idle is {}",
                    node.idle
                ));
            }
            let place = node.block.map(|block| (node.last_use, Reverse(node.depth), block));
            if place.is_some_and(|place| self.idle.contains(&place) != node.idle) {
                problems.push(format!(
                    "node {index} is not listed as it should be; idle is {}",
                    node.idle
                ));
            }
            if node.block.is_some_and(|block| self.node_of(block) != Some(id)) {
                problems.push(format!("the block of node {index} is another one's"));
            }
            let Some(parent) = node.parent else { continue };
            children[parent.0 as usize] += 1;
            let above = self.get(parent);
            let fits = above.is_some_and(|above| {
                let of_parent = above.block.map(|block| ref_counts[block.0 as usize]);
                above.depth + 1 == node.depth
                    && above.group == node.group
                    && (!whole(node.group) || of_parent >= references)
            });
            if !fits {
                problems.push(format!(
                    "node {index} follows node {}, which is not there or has fewer references",
                    parent.0
                ));
            }
        }
        self.audit_children(&children, whole, problems);
        if idle != self.idle.len() || nodes != self.index.len() {
            problems.push(format!(
                "{nodes} nodes are there, {idle} of them idle; counted are {} and {}",
                self.index.len(),
                self.idle.len()
            ));
        }
    }

    fn audit_children(&self, children: &[u32], whole: impl Fn(u32) -> bool, problems: &mut Vec<String>) {
        for (index, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            let bare = node.block.is_none() && (whole(node.group) || node.children == 0);
            if node.children != children[index] || bare {
                problems.push(format!(
                    "node {index} has {} children and counts {}; its block is {:?}",
                    children[index], node.children, node.block
                ));
            }
        }
        for (index, id) in self.nodes_of.iter().enumerate() {
            let block = id.and_then(|id| self.block_of(id));
            if id.is_some() && block != Some(BlockId(index as u32)) {
                problems.push(format!("block {index} is indexed, its node has {block:?}"));
            }
        }
    }
}
