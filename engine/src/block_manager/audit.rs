//! The audit of the books.

use super::{BlockManager, BlockTable};
use crate::plan::BlockId;

/// A group, and a place in its list.
type Place = (usize, usize);

impl BlockManager {
    /// Compares the books with the tables that exist. `elsewhere` is the number of references that tables outside of
    /// the engine (reservations) hold.
    pub(crate) fn audit<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        elsewhere: usize,
        problems: &mut Vec<String>,
    ) {
        let mut unexplained: Vec<i64> = self.ref_counts.iter().map(|&count| i64::from(count)).collect();
        let mut places = vec![None; self.total()];
        for table in tables {
            self.audit_table(table, &mut places, problems);
            for block in table.present() {
                unexplained[block.0 as usize] -= 1;
            }
        }
        for (block, &count) in unexplained.iter().enumerate().filter(|(_, count)| **count < 0) {
            problems.push(format!("block {block} is in {} tables more than are counted", -count));
        }
        let rest: i64 = unexplained.iter().filter(|count| **count > 0).sum();
        if rest != elsewhere as i64 {
            problems.push(format!(
                "{rest} block references are in no table, reservations explain {elsewhere}"
            ));
        }
        self.audit_free(problems);
        if let Some(cache) = &self.cache {
            let whole = |group: u32| !self.kept.group(group as usize).slides();
            cache.audit(&self.ref_counts, whole, problems);
        }
    }

    /// Every group's blocks of a table, by the books of that group.
    fn audit_table(&self, table: &BlockTable, places: &mut [Option<Place>], problems: &mut Vec<String>) {
        if !table.groups.is_empty() && table.groups.len() != self.kept.count()
            || !table.blocks.len().is_multiple_of(self.kept.count())
        {
            problems.push(format!(
                "a table of {} blocks in {} groups, there are {}",
                table.blocks.len(),
                table.groups.len(),
                self.kept.count()
            ));
            return;
        }
        for group in 0..table.groups.len() {
            self.audit_group(table, group, places, problems);
        }
    }

    /// The indexed blocks of a table are its first ones. A forked one may not know yet that another has indexed its block.
    /// Who shares a block has it in the same place.
    fn audit_group(&self, table: &BlockTable, group: usize, places: &mut [Option<Place>], problems: &mut Vec<String>) {
        let (of, all) = (&table.groups[group], 0..table.places());
        let gone = of.gone.min(all.end);
        let is_wrong = |(place, block): (usize, BlockId)| block.is_some() != (place >= gone);
        if table.of_group(group, all.clone()).enumerate().any(is_wrong) {
            problems.push(format!(
                "the first {gone} blocks of a table's group {group} are said to be gone, and others are"
            ));
            return;
        }
        for (place, block) in (gone..).zip(table.of_group(group, gone..all.end)) {
            let elsewhere = places[block.0 as usize].replace((group, place));
            if elsewhere.is_some_and(|elsewhere| elsewhere != (group, place)) {
                problems.push(format!(
                    "block {} is number {place} of group {group} of a table, and another one of another",
                    block.0
                ));
            }
            let indexed = self.cache.as_ref().is_some_and(|cache| cache.is_indexed(block));
            let references = self.ref_counts[block.0 as usize];
            // Who shared it and indexed it may have let go of it.
            let others = references > 1 || self.kept.group(group).slides();
            if indexed != (place < of.indexed) && !(indexed && others) {
                problems.push(format!(
                    "block {} is number {place} of a table with {} indexed blocks; indexed is {indexed}, with \
                     {references} references",
                    block.0, of.indexed
                ));
            }
        }
    }

    fn audit_free(&self, problems: &mut Vec<String>) {
        let mut listed = vec![false; self.total()];
        for block in &self.free {
            let index = block.0 as usize;
            if listed[index] {
                problems.push(format!("block {index} is in the free list twice"));
            }
            listed[index] = true;
            if self.ref_counts[index] != 0 {
                problems.push(format!(
                    "block {index} is free and has {} references",
                    self.ref_counts[index]
                ));
            }
        }
        let unused = self.ref_counts.iter().filter(|count| **count == 0).count();
        if unused != self.available() {
            problems.push(format!(
                "{unused} blocks have no reference, but {} are free and {} cached",
                self.free(),
                self.cached()
            ));
        }
    }
}
