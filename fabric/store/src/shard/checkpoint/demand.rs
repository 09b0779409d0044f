//! Who asks for a checkpoint, and for which of them the running one is.

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Demand {
    /// Something needs space or clean leaves.
    wanted: bool,
    /// Operations that wait for the next checkpoint, and whether one of their submitters promised to write no
    /// more.
    waiting: Vec<u32>,
    waiting_clean: bool,
    /// The same for the running checkpoint.
    begun: Vec<u32>,
    begun_clean: bool,
}

impl Demand {
    pub(super) fn add(&mut self, op: u32, clean: bool) {
        self.waiting.push(op);
        self.waiting_clean |= clean;
    }

    pub(super) fn want(&mut self) {
        self.wanted = true;
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// The next checkpoint begins whatever the state.
    pub(super) fn force(&mut self, clean: bool) {
        self.wanted = true;
        self.waiting_clean = clean;
    }

    /// Whether the next checkpoint is asked for.
    pub(super) fn is_any(&self) -> bool {
        self.wanted || !self.waiting.is_empty()
    }

    /// Whether an operation waits for this one or the next.
    pub(super) fn has_operations(&self) -> bool {
        !self.begun.is_empty() || !self.waiting.is_empty()
    }

    /// Whether somebody who asked promised to write no more.
    pub(super) fn is_closing(&self) -> bool {
        self.waiting_clean || self.begun_clean
    }

    /// Whether that was before the running checkpoint began.
    pub(super) fn is_begun_clean(&self) -> bool {
        self.begun_clean
    }

    /// A checkpoint begins for all who wait.
    pub(super) fn begin(&mut self) {
        self.wanted = false;
        std::mem::swap(&mut self.waiting, &mut self.begun);
        self.begun_clean = std::mem::take(&mut self.waiting_clean);
    }

    /// The running checkpoint is durable.
    pub(super) fn finish(&mut self, finish: impl FnMut(u32)) {
        self.begun.drain(..).for_each(finish);
    }

    /// The running checkpoint has ended.
    pub(super) fn end(&mut self) {
        self.begun_clean = false;
    }

    /// Nobody waits any more.
    pub(super) fn refuse(&mut self, finish: impl FnMut(u32)) {
        let begun = self.begun.drain(..);
        begun.chain(self.waiting.drain(..)).for_each(finish);
        // Whoever comes later has not promised to write no more.
        (self.begun_clean, self.waiting_clean) = (false, false);
    }
}
