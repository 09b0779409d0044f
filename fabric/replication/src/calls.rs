//! The requests of a machine that have not been answered, and what each is for.

/// Names a request of a machine in its actions and the answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Call(pub u32);

/// Calls whose answers are due: until they are, the machine's memory is in use.
#[derive(Debug)]
pub(crate) struct Calls<Purpose> {
    due: Vec<(Call, Purpose)>,
    next: u32,
}

impl<Purpose> Calls<Purpose> {
    pub(crate) fn new() -> Self {
        Self {
            due: Vec::new(),
            next: 0,
        }
    }

    /// Something is about to be asked.
    pub(crate) fn begin(&mut self, purpose: Purpose) -> Call {
        let call = Call(self.next);
        self.next = self.next.wrapping_add(1);
        self.due.push((call, purpose));
        call
    }

    /// An answer is there: to what. `None`: it is to nothing that was asked.
    pub(crate) fn end(&mut self, call: Call) -> Option<Purpose> {
        let at = self.due.iter().position(|(c, _)| *c == call)?;
        Some(self.due.swap_remove(at).1)
    }

    /// How many are due.
    pub(crate) fn len(&self) -> usize {
        self.due.len()
    }

    /// No call is due.
    pub(crate) fn is_empty(&self) -> bool {
        self.due.is_empty()
    }
}
