//! Units that were freed, and who may still read them.
//!
//! A freed unit is not handed out before a checkpoint that no longer names it is durable, and nobody reads it
//! any more. Two *generations* are told apart: what was freed before the running checkpoint began is *frozen*
//! and comes back when that ends; what is freed meanwhile waits for the next one. Whoever looks units up in
//! the map is a reader of the generation in which it began.

use super::Run;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Quarantine {
    /// Freed since the last checkpoint began.
    freed: Vec<Run>,
    /// Freed before the running checkpoint began.
    frozen: Vec<Run>,
    units: u64,
    /// Readers by generation.
    readers: [u32; 2],
    /// The one that begins now.
    generation: u8,
}

impl Quarantine {
    /// Units in both generations.
    pub(super) fn units(&self) -> u64 {
        self.units
    }

    /// Runs in both generations.
    pub(super) fn runs(&self) -> usize {
        self.freed.len() + self.frozen.len()
    }

    pub(super) fn ram_bytes(&self) -> u64 {
        ((self.freed.capacity() + self.frozen.capacity()) * size_of::<Run>()) as u64
    }

    /// Freed now: waits for the checkpoint that begins after this.
    pub(super) fn push(&mut self, run: Run) {
        self.units += u64::from(run.len);
        push_run(&mut self.freed, run);
    }

    /// Replaced by the running checkpoint: waits for its end.
    pub(super) fn push_frozen(&mut self, run: Run) {
        self.units += u64::from(run.len);
        push_run(&mut self.frozen, run);
    }

    /// A checkpoint begins.
    pub(super) fn freeze(&mut self) {
        assert!(
            self.frozen.is_empty(),
            "the previous checkpoint has not released its units"
        );
        std::mem::swap(&mut self.freed, &mut self.frozen);
        self.generation ^= 1;
    }

    /// Whether somebody reads what is frozen.
    pub(super) fn is_frozen_read(&self) -> bool {
        self.readers[usize::from(self.generation ^ 1)] > 0
    }

    /// What is frozen, to be made free.
    pub(super) fn take_frozen(&mut self) -> Vec<Run> {
        let frozen = std::mem::take(&mut self.frozen);
        self.units -= frozen.iter().map(|run| u64::from(run.len)).sum::<u64>();
        frozen
    }

    /// Takes the list back for its memory.
    pub(super) fn reuse(&mut self, mut frozen: Vec<Run>) {
        frozen.clear();
        self.frozen = frozen;
    }

    /// Somebody begins to read; returns the generation, which `end_reader` wants to know.
    pub(super) fn begin_reader(&mut self) -> u8 {
        self.readers[usize::from(self.generation)] += 1;
        self.generation
    }

    pub(super) fn end_reader(&mut self, generation: u8) {
        self.readers[usize::from(generation)] -= 1;
    }
}

fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.start + last.len == run.start => last.len += run.len,
        _ => runs.push(run),
    }
}
