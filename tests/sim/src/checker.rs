//! What guests may see: each sector of a volume is a register, and what was written and read must fit one
//! order.
//!
//! Every write has a tag of its own, so a read tells which write it saw. A write and the reads that saw it
//! form a *cluster*. Two facts decide (Gibbons and Korach, "Testing shared memories"): once an operation of a
//! cluster has ended, the register has held its value; while one has still to begin, it has not lost it for
//! good. From the first end to the last start the register therefore held this value and no other. If every
//! cluster's first end comes after its last start nothing is certain, and the cluster fits anywhere between
//! the two. A history is linearizable exactly if no two of the certain spans overlap and no uncertain one
//! lies inside a certain one of another cluster.
//!
//! A write without an answer (its host died, or it ended with an error) never ends: it may take effect at any
//! time, or never.
//!
//! **Zeroes** are written by discards and stand in what nobody wrote, so a read of zeroes may have seen
//! several clusters. It is refused if none fits, and counts for a cluster only if no other one does: no false
//! alarm, some blindness.
//!
//! **Power loss of all replicas** ([`Checker::rollback`]) takes each sector back to a cluster that no
//! *flushed* one must come after. Which one is unknown until a read tells; from then on it is that.

use std::fmt;

mod content;
#[cfg(test)]
mod tests;

pub use content::{fill, tags_of};

/// Names a write to the checker; [`ZERO`] is the content of what was never written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag(pub u32);

/// What a sector of zeroes shows.
pub const ZERO: Tag = Tag(0);

/// A moment; each beginning and end of an operation has one of its own.
type Stamp = u64;

/// Not yet.
const NEVER: Stamp = Stamp::MAX;

/// A write, and the reads that saw it.
#[derive(Clone, Copy)]
struct Cluster {
    tag: Tag,
    /// It wrote zeroes.
    zeroes: bool,
    /// End of the first operation that ended.
    first_end: Stamp,
    /// Start of the operation that started last.
    last_start: Stamp,
    /// When the write was acknowledged.
    acked: Stamp,
    /// Acknowledged as durable.
    fua: bool,
    /// Whoever wrote it may still do so.
    live: bool,
    /// One of those that a loss of power may have left behind.
    relic: bool,
    /// Power was lost while it was under way.
    spans_loss: bool,
    /// When whoever might have written it was kept out: it has taken effect by then, or never will.
    sealed: Stamp,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |stamp: Stamp| match stamp {
            NEVER => "never".to_owned(),
            stamp => stamp.to_string(),
        };
        let (first_end, last_start) = (show(self.first_end), show(self.last_start));
        write!(
            f,
            "[tag {}: first end {first_end}, last start {last_start}, acknowledged {}",
            self.tag.0,
            show(self.acked)
        )?;
        for (is, what) in [
            (self.zeroes, ", zeroes"),
            (self.live, ", under way"),
            (self.relic, ", left over"),
        ] {
            write!(f, "{}", if is { what } else { "" })?;
        }
        write!(f, "]")
    }
}

impl Cluster {
    /// The span over which it certainly held, or within which it may lie anywhere.
    fn span(&self) -> (Stamp, Stamp) {
        (
            self.first_end.min(self.last_start),
            self.first_end.max(self.last_start),
        )
    }

    fn is_certain(&self) -> bool {
        self.first_end < self.last_start
    }

    /// Whether the two cannot both be right.
    fn contradicts(&self, other: &Self) -> bool {
        let ((a, b), (c, d)) = (self.span(), other.span());
        match (self.is_certain(), other.is_certain()) {
            (true, true) => a < d && c < b,
            (true, false) => a < c && d < b,
            (false, true) => c < a && b < d,
            (false, false) => false,
        }
    }

    /// One that a loss of power may have left, and that nobody writes any more.
    fn is_left_over(&self) -> bool {
        self.relic && !self.live
    }

    /// Whether `other` came later in every order.
    fn precedes(&self, other: &Self) -> bool {
        self.first_end < other.last_start
    }
}

#[derive(Debug, Clone, Default)]
struct Register {
    /// In order of their start; an empty list is zeroes since ever.
    clusters: Vec<Cluster>,
}

const PRIMEVAL: Cluster = Cluster {
    tag: ZERO,
    zeroes: true,
    first_end: 0,
    last_start: 0,
    acked: 0,
    fua: true,
    live: false,
    relic: false,
    spans_loss: false,
    sealed: NEVER,
};

/// Why a history is impossible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Volume.
    pub volume: usize,
    /// Sector of it.
    pub sector: u64,
    /// What is wrong, with the clusters of the sector.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            volume,
            sector,
            what,
        } = self;
        write!(f, "volume {volume}, sector {sector}: {what}")
    }
}

/// An operation under way, as the checker knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Begun {
    start: Stamp,
}

#[derive(Debug, Default)]
struct Volume {
    registers: Vec<Register>,
    /// Start of the latest flush that ended well.
    flushed: Stamp,
    /// When it ended.
    flushed_end: Stamp,
    /// Start of one before it: the later one has made durable what logs say of this one.
    recorded: Stamp,
    /// Starts of the reads under way.
    reading: Vec<Stamp>,
    /// When its sectors were last taken back, by sector range.
    rolled_back: Stamp,
    /// When the lease came to its holder: what was acknowledged before, that one does not know of.
    opened: Stamp,
    /// Up to when writes were acknowledged that a loss of power may have taken. A flush that comes after it
    /// must fail.
    owed: Option<Stamp>,
    /// No flush has ended well since the last loss of power: one may fail.
    may_fail: bool,
    /// When a flush last failed: those under way then may fail, too.
    reported: Stamp,
    /// Start of the latest flush that failed: whoever asked for it takes no earlier write for durable.
    warned: Stamp,
}

/// Histories of all volumes. See the module.
#[derive(Debug, Default)]
pub struct Checker {
    volumes: Vec<Volume>,
    clock: Stamp,
    /// Sectors of reads that were compared.
    pub sectors_read: u64,
}

impl Checker {
    /// Adds a volume of zeroes.
    pub fn add_volume(&mut self, sectors: u64) -> usize {
        let registers = vec![Register::default(); sectors as usize];
        self.volumes.push(Volume {
            registers,
            ..Volume::default()
        });
        self.volumes.len() - 1
    }

    fn tick(&mut self) -> Stamp {
        self.clock += 1;
        self.clock
    }

    /// A write of `tag` to these sectors was submitted; `zeroes`: it is a discard, or writes zeroes.
    pub fn begin_write(
        &mut self,
        volume: usize,
        sectors: std::ops::Range<u64>,
        tag: Tag,
        zeroes: bool,
    ) -> Begun {
        let start = self.tick();
        let oldest_read = self.oldest_read(volume, start);
        let recorded = self.volumes[volume].recorded;
        for sector in sectors {
            let register = &mut self.volumes[volume].registers[sector as usize];
            if register.clusters.is_empty() {
                register.clusters.push(PRIMEVAL);
            }
            register.prune(oldest_read, recorded);
            register.clusters.push(Cluster {
                tag,
                zeroes,
                first_end: NEVER,
                last_start: start,
                acked: NEVER,
                fua: false,
                live: true,
                relic: false,
                spans_loss: false,
                sealed: NEVER,
            });
        }
        Begun { start }
    }

    /// The write was acknowledged; with `fua` it is durable.
    pub fn end_write(
        &mut self,
        volume: usize,
        sectors: std::ops::Range<u64>,
        tag: Tag,
        fua: bool,
    ) -> Result<(), Violation> {
        let end = self.tick();
        let mut may_fail = false;
        for sector in sectors {
            let register = &mut self.volumes[volume].registers[sector as usize];
            let Some(at) = register.clusters.iter().position(|c| c.tag == tag) else {
                // A read has shown that something else came after it, before it was acknowledged.
                continue;
            };
            let cluster = &mut register.clusters[at];
            cluster.first_end = cluster.first_end.min(end);
            (cluster.acked, cluster.fua, cluster.live) = (end, fua, false);
            // If power was lost while it was under way, it came after that, and the next loss may undo it.
            cluster.relic = false;
            // Replicas may have done a part of it before, and lost that: its host cannot tell.
            may_fail |= std::mem::take(&mut cluster.spans_loss);
            let cluster = *cluster;
            register
                .check(at, &cluster)
                .map_err(|what| violation(volume, sector, what))?;
        }
        self.volumes[volume].may_fail |= may_fail;
        Ok(())
    }

    /// The write will never be acknowledged: its host died, or it ended with an error.
    pub fn abandon_write(&mut self, volume: usize, sectors: std::ops::Range<u64>, tag: Tag) {
        for sector in sectors {
            let register = &mut self.volumes[volume].registers[sector as usize];
            for cluster in register.clusters.iter_mut().filter(|c| c.tag == tag) {
                cluster.live = false;
            }
        }
    }

    /// A new lease: what the holders before it were not told the end of has taken effect by now, or never
    /// will.
    pub fn seal(&mut self, volume: usize) {
        let now = self.tick();
        let registers = &mut self.volumes[volume].registers;
        let clusters = registers.iter_mut().flat_map(|r| &mut r.clusters);
        for cluster in clusters.filter(|c| !c.live && c.acked == NEVER) {
            cluster.sealed = cluster.sealed.min(now);
        }
    }

    /// A read or a flush was submitted.
    pub fn begin_read(&mut self, volume: usize) -> Begun {
        let start = self.tick();
        self.volumes[volume].reading.push(start);
        Begun { start }
    }

    /// The read will not be answered.
    pub fn abandon_read(&mut self, volume: usize, begun: Begun) {
        let reading = &mut self.volumes[volume].reading;
        if let Some(at) = reading.iter().position(|&start| start == begun.start) {
            reading.swap_remove(at);
        }
    }

    /// The read ended; `shown` are the tags of the sectors from `first` on.
    pub fn end_read(
        &mut self,
        volume: usize,
        begun: Begun,
        first: u64,
        shown: &[Tag],
    ) -> Result<(), Violation> {
        let end = self.tick();
        self.abandon_read(volume, begun);
        let of = &mut self.volumes[volume];
        if begun.start < of.rolled_back {
            // Under way while all lost power: it may show either side.
            return Ok(());
        }
        self.sectors_read += shown.len() as u64;
        for (&tag, sector) in shown.iter().zip(first..) {
            let register = &mut of.registers[sector as usize];
            register
                .read(tag, begun.start, end)
                .map_err(|what| violation(volume, sector, what))?;
        }
        Ok(())
    }

    /// A flush was submitted.
    pub fn begin_flush(&mut self) -> Begun {
        Begun { start: self.tick() }
    }

    /// The volume has another holder.
    pub fn open(&mut self, volume: usize) {
        let now = self.tick();
        let of = &mut self.volumes[volume];
        of.opened = now;
        of.owed = None;
    }

    /// A flush ended well: what was acknowledged before its start is durable.
    pub fn end_flush(&mut self, volume: usize, begun: Begun) -> Result<(), String> {
        let now = self.tick();
        let of = &mut self.volumes[volume];
        if begun.start > of.flushed {
            if begun.start > of.flushed_end {
                of.recorded = of.flushed;
            }
            (of.flushed, of.flushed_end) = (begun.start, now);
        }
        // One that was under way while power was lost may have been done just before.
        of.owed = of
            .owed
            .filter(|&owed| begun.start > of.rolled_back || owed > begun.start);
        match of.owed {
            Some(owed) if begun.start > of.rolled_back => Err(format!(
                "invariant Durable: volume {volume}: a flush begun at {} ended well, and writes acknowledged \
                 up to {owed} were lost with the power at {}",
                begun.start, of.rolled_back
            )),
            _ => {
                of.may_fail &= begun.start <= of.rolled_back;
                Ok(())
            }
        }
    }

    /// A flush failed; true if a loss of power explains it.
    pub fn fail_flush(&mut self, volume: usize, begun: Begun) -> bool {
        let now = self.tick();
        let of = &mut self.volumes[volume];
        let explained = of.may_fail || begun.start < of.reported;
        of.warned = of.warned.max(begun.start);
        if of.may_fail {
            of.may_fail = false;
            of.owed = None;
            of.reported = now;
        }
        explained
    }

    /// All replicas of these sectors lost what was not flushed.
    pub fn rollback(&mut self, volume: usize, concerned: impl Fn(u64) -> bool) {
        let now = self.tick();
        let of = &mut self.volumes[volume];
        of.rolled_back = now;
        of.may_fail = true;
        let covered = of.flushed.max(of.opened).max(of.warned);
        for (sector, register) in (0..).zip(&mut of.registers) {
            if concerned(sector) {
                of.owed = of.owed.max(register.unflushed(covered));
                register.roll_back(now, of.flushed, true);
            }
        }
    }

    /// What was not flushed of these sectors may be gone, and nobody can know; if power was lost, also what
    /// only the last flush made durable, or a write that was to be durable by itself: the log's word about
    /// that is not durable itself.
    pub fn lose_unknown(
        &mut self,
        volume: usize,
        lost_power: bool,
        concerned: impl Fn(u64) -> bool,
    ) {
        let now = self.tick();
        let of = &mut self.volumes[volume];
        let durable = if lost_power { of.recorded } else { of.flushed };
        for (sector, register) in (0..).zip(&mut of.registers) {
            if concerned(sector) {
                register.roll_back(now, durable, !lost_power);
            }
        }
    }

    /// A device shows `tag` in a sector after a loss of power that hit it alone.
    ///
    /// # Errors
    /// Something flushed came after that.
    pub fn would_be_left(&self, volume: usize, sector: u64, tag: Tag) -> Result<(), String> {
        let of = &self.volumes[volume];
        let mut register = of.registers[sector as usize].clone();
        register.roll_back(self.clock + 1, of.flushed, true);
        register.read(tag, self.clock + 2, self.clock + 3)
    }

    fn oldest_read(&self, volume: usize, now: Stamp) -> Stamp {
        let reading = &self.volumes[volume].reading;
        reading.iter().copied().min().unwrap_or(now).min(now)
    }

    /// Most clusters that a sector has; for watching that the checker stays small.
    pub fn longest(&self) -> usize {
        let registers = self.volumes.iter().flat_map(|v| &v.registers);
        registers.map(|r| r.clusters.len()).max().unwrap_or(0)
    }
}

fn violation(volume: usize, sector: u64, what: String) -> Violation {
    Violation {
        volume,
        sector,
        what,
    }
}

impl Register {
    /// Forgets clusters that no read from now on may show, whatever happens to the power: a durable one that
    /// ended before the oldest read under way began came after them.
    fn prune(&mut self, oldest_read: Stamp, flushed: Stamp) {
        let durable = |c: &Cluster| c.acked <= flushed || c.fua;
        let newest = self
            .clusters
            .iter()
            .filter(|c| durable(c) && c.span().1 < oldest_read)
            .map(|c| c.span().0)
            .max();
        if let Some(newest) = newest {
            self.clusters
                .retain(|c| c.first_end >= newest || c.span().0 == newest);
        }
    }

    /// Whether the cluster at `at`, were it so, fits the others.
    fn check(&self, at: usize, cluster: &Cluster) -> Result<(), String> {
        let others = self.clusters.iter().enumerate();
        let clash = others
            .filter(|(i, c)| *i != at && !c.relic)
            .find(|(_, c)| cluster.contradicts(c));
        match clash {
            None => Ok(()),
            Some((_, other)) => Err(format!(
                "{cluster:?} contradicts {other:?}; all: {:?}",
                self.clusters
            )),
        }
    }

    fn read(&mut self, tag: Tag, start: Stamp, end: Stamp) -> Result<(), String> {
        if self.clusters.is_empty() {
            if tag == ZERO {
                return Ok(());
            }
            return Err(format!("{tag:?} was never written here"));
        }
        let shows = |c: &Cluster| {
            if tag == ZERO {
                c.zeroes
            } else {
                c.tag == tag && !c.zeroes
            }
        };
        let mut fitting = None;
        let mut others = 0;
        let mut why = None;
        for at in 0..self.clusters.len() {
            if !shows(&self.clusters[at]) {
                continue;
            }
            match self.extended(at, start, end) {
                Ok(_) if fitting.is_some_and(|f: usize| self.same_relics(f, at)) => {}
                Ok(_) => {
                    others += usize::from(fitting.is_some());
                    fitting = Some(at);
                }
                Err(error) => why = Some(error),
            }
        }
        let Some(at) = fitting else {
            let known = &self.clusters;
            return Err(why.unwrap_or_else(|| {
                format!(
                    "a read from {start} to {end} shows {tag:?}, overwritten long ago or never written: \
                     {known:?}"
                )
            }));
        };
        if others == 0 {
            self.extend(at, start, end)?;
        }
        Ok(())
    }

    /// Zeroes left by a loss of power are all the same.
    fn same_relics(&self, a: usize, b: usize) -> bool {
        self.clusters[a].is_left_over() && self.clusters[b].is_left_over()
    }

    /// The cluster with a read more, if that is possible.
    fn extended(&self, at: usize, start: Stamp, end: Stamp) -> Result<Cluster, String> {
        let mut cluster = self.clusters[at];
        cluster.relic = false;
        cluster.first_end = cluster.first_end.min(end).min(cluster.sealed);
        cluster.last_start = cluster.last_start.max(start);
        self.check(at, &cluster)?;
        Ok(cluster)
    }

    fn extend(&mut self, at: usize, start: Stamp, end: Stamp) -> Result<(), String> {
        let was_left_over = self.clusters[at].is_left_over();
        self.clusters[at] = self.extended(at, start, end)?;
        if was_left_over {
            // It is the one that was left behind, so the others were not, unless somebody is still writing
            // them.
            self.clusters.retain(|c| !c.is_left_over());
        }
        Ok(())
    }

    /// When the last of its writes was acknowledged that came after `covered` and is not durable.
    fn unflushed(&self, covered: Stamp) -> Option<Stamp> {
        let acked = self.clusters.iter().filter(|c| !c.fua).map(|c| c.acked);
        acked.filter(|&at| at != NEVER && at > covered).max()
    }

    fn roll_back(&mut self, now: Stamp, flushed: Stamp, counts_fua: bool) {
        let durable: Vec<Cluster> = self
            .clusters
            .iter()
            .filter(|c| c.acked <= flushed || c.fua && counts_fua)
            .copied()
            .collect();
        self.clusters
            .retain(|c| c.live || !durable.iter().any(|d| c.tag != d.tag && c.precedes(d)));
        let alone = self.clusters.len() == 1;
        for cluster in &mut self.clusters {
            cluster.relic = !alone;
            cluster.sealed = NEVER;
            // Whether it was durable decides about the next loss of power as well: what is left is on the
            // devices.
            cluster.first_end = if cluster.live { NEVER } else { now };
            cluster.last_start = now;
            cluster.spans_loss |= cluster.live;
            if !cluster.live {
                (cluster.acked, cluster.fua) = (now, true);
            }
        }
    }
}
