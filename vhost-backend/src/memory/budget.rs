//! How much memory of guests the daemon maps, and pins for RDMA: bounded for each attachment, and for all of
//! them together.
//!
//! A front end names as much memory as it likes: a sparse file costs it nothing. For the daemon every mapping
//! costs address space and page tables, and pinned pages cannot be given back. What is counted is the memory
//! table that is in force, and the dirty log. While a front end replaces its table, the larger of the two
//! counts, not their sum: else a guest with more than half of the bound could never replace its table. So for
//! that moment up to twice as much is mapped, and pinned, as is counted.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fabric_types::registrar::{MemoryRegistrar, NoRegistrar};

/// Most bytes of one attachment, unless configured: more than the largest guests have today.
pub const BYTES_MAX_PER_ATTACHMENT: u64 = 4 << 40;
/// Most bytes of all attachments, unless configured: an eighth of a process's address space.
pub const BYTES_MAX: u64 = 16 << 40;
/// Shortest time between two warnings of one kind about one attachment. Those in between are not told.
pub const WARNING_PAUSE: Duration = Duration::from_secs(60);

/// A bound in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Of one attachment. A table beyond it is refused, or its regions are not pinned.
    pub per_attachment: u64,
    /// Of all attachments of the daemon. The one that comes last is refused, or not pinned.
    pub total: u64,
}

impl Default for Limit {
    fn default() -> Self {
        Self {
            per_attachment: BYTES_MAX_PER_ATTACHMENT,
            total: BYTES_MAX,
        }
    }
}

/// What is bounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Mapped into this process.
    Mapped,
    /// Pinned, so that a card reads and writes it.
    Pinned,
}

impl Use {
    /// Beginning of the keys that configure it.
    fn key(self) -> &'static str {
        match self {
            Self::Mapped => "guest_memory_max",
            Self::Pinned => "pinned_memory_max",
        }
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mapped => "mapped",
            Self::Pinned => "pinned",
        })
    }
}

/// Why no more memory is mapped, or pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    /// The attachment has too much.
    #[error(
        "an attachment may have {max_bytes} bytes of guest memory {of}, and this one asks for \
         {wanted_bytes}; raise {}_per_attachment",
        .of.key()
    )]
    Attachment {
        /// What is bounded.
        of: Use,
        /// Bytes that it would have.
        wanted_bytes: u64,
        /// Bytes that it may have.
        max_bytes: u64,
    },
    /// All attachments together have too much.
    #[error(
        "all attachments may have {max_bytes} bytes of guest memory {of}: others have {others_bytes}, and \
         this one asks for {wanted_bytes}; raise {} or detach a guest",
        .of.key()
    )]
    Total {
        /// What is bounded.
        of: Use,
        /// Bytes that the attachment would have.
        wanted_bytes: u64,
        /// Bytes that the others have.
        others_bytes: u64,
        /// Bytes that all may have.
        max_bytes: u64,
    },
}

/// Bytes that all attachments have.
#[derive(Debug)]
struct Pool {
    of: Use,
    limit: Limit,
    used_bytes: Mutex<u64>,
}

impl Pool {
    fn new(of: Use, limit: Limit) -> Arc<Self> {
        let used_bytes = Mutex::new(0);
        Arc::new(Self {
            of,
            limit,
            used_bytes,
        })
    }

    fn used(&self) -> MutexGuard<'_, u64> {
        self.used_bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// The daemon's bounds. Clones are of the same.
#[derive(Debug, Clone)]
pub struct MemoryBudget {
    mapped: Arc<Pool>,
    pinned: Arc<Pool>,
}

impl MemoryBudget {
    /// With these bounds.
    pub fn new(mapped: Limit, pinned: Limit) -> Self {
        Self {
            mapped: Pool::new(Use::Mapped, mapped),
            pinned: Pool::new(Use::Pinned, pinned),
        }
    }

    /// Bytes of guest memory that count as mapped now.
    pub fn mapped_bytes(&self) -> u64 {
        *self.mapped.used()
    }

    /// Bytes of guest memory that count as pinned now.
    pub fn pinned_bytes(&self) -> u64 {
        *self.pinned.used()
    }
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self::new(Limit::default(), Limit::default())
    }
}

/// What one attachment has of a [`Pool`]. Given back when dropped.
#[derive(Debug)]
struct Share {
    pool: Arc<Pool>,
    held_bytes: u64,
}

impl Share {
    fn of(pool: &Arc<Pool>) -> Self {
        Self {
            pool: Arc::clone(pool),
            held_bytes: 0,
        }
    }

    /// Takes so much that it has `bytes` at least, or nothing more.
    fn grow_to(&mut self, bytes: u64) -> Result<(), OverLimit> {
        if bytes <= self.held_bytes {
            return Ok(());
        }
        let Pool { of, limit, .. } = *self.pool;
        if bytes > limit.per_attachment {
            return Err(OverLimit::Attachment {
                of,
                wanted_bytes: bytes,
                max_bytes: limit.per_attachment,
            });
        }
        let mut used = self.pool.used();
        let others_bytes = *used - self.held_bytes;
        let sum = others_bytes.checked_add(bytes);
        let Some(sum) = sum.filter(|sum| *sum <= limit.total) else {
            return Err(OverLimit::Total {
                of,
                wanted_bytes: bytes,
                others_bytes,
                max_bytes: limit.total,
            });
        };
        *used = sum;
        self.held_bytes = bytes;
        Ok(())
    }

    /// Gives back what it has beyond `bytes`.
    fn shrink_to(&mut self, bytes: u64) {
        let back = self.held_bytes.saturating_sub(bytes);
        *self.pool.used() -= back;
        self.held_bytes -= back;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// When a warning was given last.
#[derive(Debug, Default)]
struct Pause(Mutex<Option<Instant>>);

impl Pause {
    /// Whether it may be given now, after which it may not for a while.
    fn is_over(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = last.is_none_or(|at| at.elapsed() >= WARNING_PAUSE);
        if is_over {
            *last = Some(Instant::now());
        }
        is_over
    }
}

/// Problems of guest memory that were logged, on any connection of the attachment.
#[derive(Debug, Default)]
struct Logged {
    unsealed: AtomicBool,
    not_pinned: Pause,
}

/// How an attachment treats its guest's memory. Clones are of the same attachment.
#[derive(Debug, Clone)]
pub struct MemoryPolicy {
    registrar: Arc<dyn MemoryRegistrar>,
    budget: MemoryBudget,
    logged: Arc<Logged>,
}

impl MemoryPolicy {
    /// Opens memory to the network by `registrar`, within `budget`.
    pub fn new(registrar: impl MemoryRegistrar + 'static, budget: MemoryBudget) -> Self {
        Self {
            registrar: Arc::new(registrar),
            budget,
            logged: Arc::default(),
        }
    }

    /// Opens nothing to the network, and has a budget of its own.
    pub fn alone() -> Self {
        Self::new(NoRegistrar, MemoryBudget::default())
    }

    /// For one connection.
    pub fn account(&self) -> MemoryAccount {
        MemoryAccount {
            in_use: InUse::default(),
            mapped: Share::of(&self.budget.mapped),
            pinned: Share::of(&self.budget.pinned),
            warned_not_pinned: false,
            policy: self.clone(),
        }
    }
}

/// What one connection has mapped and pinned. All is given back when it is dropped.
///
/// A caller reserves the bytes that a change needs, makes the change, and then calls
/// [`set_in_use`](Self::set_in_use), whether or not the change succeeded.
#[derive(Debug)]
pub struct MemoryAccount {
    policy: MemoryPolicy,
    in_use: InUse,
    mapped: Share,
    pinned: Share,
    warned_not_pinned: bool,
}

/// Bytes that a connection uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InUse {
    /// Mapped for the memory table.
    pub table_bytes: u64,
    /// Mapped for the dirty log.
    pub log_bytes: u64,
    /// Pinned regions of the memory table.
    pub pinned_bytes: u64,
}

impl MemoryAccount {
    /// What opens memory to the network.
    pub(super) fn registrar(&self) -> &dyn MemoryRegistrar {
        &*self.policy.registrar
    }

    /// Reserves what a memory table of `bytes` takes.
    pub fn reserve_table(&mut self, bytes: u64) -> Result<(), OverLimit> {
        self.mapped
            .grow_to(bytes.saturating_add(self.in_use.log_bytes))
    }

    /// Reserves what a dirty log of `bytes` takes.
    pub fn reserve_log(&mut self, bytes: u64) -> Result<(), OverLimit> {
        self.mapped
            .grow_to(bytes.saturating_add(self.in_use.table_bytes))
    }

    /// Gives back all but what is in use.
    pub fn set_in_use(&mut self, in_use: InUse) {
        self.in_use = in_use;
        self.mapped
            .shrink_to(in_use.table_bytes.saturating_add(in_use.log_bytes));
        self.pinned.shrink_to(in_use.pinned_bytes);
    }

    /// Whether `bytes` may be pinned. If not, that is told once.
    pub(super) fn may_pin(&mut self, bytes: u64) -> bool {
        let Err(error) = self.pinned.grow_to(bytes) else {
            return true;
        };
        let is_first = !std::mem::replace(&mut self.warned_not_pinned, true);
        if is_first && self.policy.logged.not_pinned.is_over() {
            tracing::warn!(
                %error,
                "a guest's memory is not pinned, and its data are copied"
            );
        }
        false
    }

    /// Logs once per attachment that a front end can shorten the memory that it shares. Not a warning: it
    /// depends on the configuration of the virtual machine monitor, and the guest is served normally.
    pub fn note_unsealed(&mut self, why: &'static str) {
        if !self.policy.logged.unsealed.swap(true, Ordering::Relaxed) {
            tracing::info!(
                "guest memory {why}: a front end that shortens it ends this daemon (SIGBUS); QEMU's \
                 memory-backend-memfd shares sealed memory"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(per_attachment: u64, total: u64) -> MemoryBudget {
        let limit = Limit {
            per_attachment,
            total,
        };
        MemoryBudget::new(limit, limit)
    }

    fn table(table_bytes: u64) -> InUse {
        InUse {
            table_bytes,
            ..InUse::default()
        }
    }

    #[test]
    fn an_attachment_is_bounded_and_so_are_all() {
        let budget = budget(100, 150);
        let policy = MemoryPolicy::new(NoRegistrar, budget.clone());
        let (mut one, mut other) = (policy.account(), policy.account());
        one.reserve_table(100).unwrap();
        let error = one.reserve_table(101).unwrap_err().to_string();
        assert!(error.contains("guest_memory_max_per_attachment"), "{error}");
        let error = other.reserve_table(51).unwrap_err().to_string();
        assert!(error.contains("raise guest_memory_max or"), "{error}");
        other.reserve_table(50).unwrap();
        assert_eq!(budget.mapped_bytes(), 150);
        drop(one);
        assert_eq!(budget.mapped_bytes(), 50);
        other.reserve_table(100).unwrap();
    }

    #[test]
    fn while_a_table_is_replaced_the_larger_one_counts() {
        let budget = budget(100, 100);
        let policy = MemoryPolicy::new(NoRegistrar, budget.clone());
        let mut account = policy.account();
        account.reserve_table(80).unwrap();
        account.reserve_table(90).unwrap();
        account.set_in_use(table(90));
        account.reserve_table(10).unwrap();
        assert_eq!(budget.mapped_bytes(), 90);
        account.set_in_use(table(10));
        assert_eq!(budget.mapped_bytes(), 10);
    }

    #[test]
    fn a_dirty_log_counts_with_the_table() {
        let budget = budget(100, 100);
        let mut account = MemoryPolicy::new(NoRegistrar, budget.clone()).account();
        account.reserve_table(80).unwrap();
        account.set_in_use(table(80));
        assert!(account.reserve_log(21).is_err());
        account.reserve_log(20).unwrap();
        account.set_in_use(InUse {
            log_bytes: 20,
            ..table(80)
        });
        assert!(account.reserve_table(81).is_err());
        assert_eq!(budget.mapped_bytes(), 100);
    }

    #[test]
    fn a_sum_that_overflows_is_beyond_any_bound() {
        let policy = MemoryPolicy::new(NoRegistrar, budget(u64::MAX, u64::MAX));
        let (mut one, mut other) = (policy.account(), policy.account());
        one.reserve_table(u64::MAX).unwrap();
        assert!(other.reserve_table(1).is_err());
    }
}
