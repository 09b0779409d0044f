//! The blocks that devices cannot give, whoever met them, and what became of them: listed until they are
//! written again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use fabric_replication::repair::queue::{BadBlock, Outcome, QUEUE_MAX};
use fabric_store::api::ScrubFinding;
use fabric_types::ids::ChunkKey;

/// Bad blocks remembered per device. Further ones are counted and logged: a device with so many is to be
/// replaced.
pub const FINDINGS_MAX: usize = 1024;

/// How a device's scrubbing stands.
#[derive(Debug, Clone, Default)]
pub struct ScrubStatus {
    /// Passes completed since start.
    pub passes: u64,
    /// Blocks verified since start.
    pub blocks: u64,
    /// Bad blocks found since start.
    pub bad_blocks: u64,
    /// Bad blocks that were written again from another replica since start.
    pub repaired_blocks: u64,
    /// Bad blocks that are bad still, the first [`FINDINGS_MAX`] of them. Those that reads have met are among
    /// them.
    pub findings: Vec<ScrubFinding>,
    /// More were found than are listed. A pass that finds fewer ends that.
    pub is_more: bool,
    /// Findings that no other replica could give. They are bad until they are overwritten, discarded or
    /// deleted. The others are about to be written again.
    pub lost: Vec<ScrubFinding>,
}

#[derive(Debug, Default)]
struct Listed {
    status: ScrubStatus,
    /// For each finding: no other replica could give it.
    stuck: Vec<bool>,
    /// One was not listed in the pass that is under way.
    overflowed: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Damage {
    devices: Mutex<Vec<Listed>>,
    /// Bad blocks that are to be repaired from other replicas.
    to_repair: Mutex<Vec<BadBlock>>,
    /// There is something in it.
    is_waiting: AtomicBool,
}

fn is_at(finding: &ScrubFinding, bad: &BadBlock) -> bool {
    (finding.layer, finding.chunk, finding.block) == (bad.chunk.layer, bad.chunk.index, bad.block)
}

fn place_of(device: u32, finding: &ScrubFinding) -> BadBlock {
    BadBlock {
        device,
        chunk: ChunkKey {
            layer: finding.layer,
            index: finding.chunk,
        },
        block: finding.block,
    }
}

impl Damage {
    /// Adds a device without findings.
    pub fn add_device(&self) {
        self.devices().push(Listed::default());
    }

    fn devices(&self) -> MutexGuard<'_, Vec<Listed>> {
        self.devices.lock().expect("no panic under this lock")
    }

    /// How all devices stand.
    pub fn statuses(&self) -> Vec<ScrubStatus> {
        let status = |listed: &Listed| {
            let findings = listed.status.findings.iter().zip(&listed.stuck);
            let lost = findings.filter(|(_, is_stuck)| **is_stuck);
            ScrubStatus {
                lost: lost.map(|(finding, _)| *finding).collect(),
                ..listed.status.clone()
            }
        };
        self.devices().iter().map(status).collect()
    }

    /// Records a step of the scrubber. Blocks that are still listed when a pass ends are examined again: they
    /// may be readable, or another replica may have them by now.
    pub fn on_step(&self, device: usize, blocks: u64, pass_done: bool) {
        let mut all = self.devices();
        let listed = &mut all[device];
        let status = &mut listed.status;
        status.blocks = blocks;
        if !pass_done {
            return;
        }
        status.passes += 1;
        status.is_more = std::mem::take(&mut listed.overflowed);
        for finding in &listed.status.findings {
            self.hand_over(place_of(device as u32, finding));
        }
    }

    /// A block that was bad has been written, or is not in use any more.
    #[cold]
    pub fn on_healed(&self, device: u32, chunk: ChunkKey, block: u32) {
        let bad = BadBlock {
            device,
            chunk,
            block,
        };
        if self.devices()[device as usize].strike(&bad) {
            tracing::info!(
                device,
                ?chunk,
                block,
                "a bad block has been overwritten, or freed"
            );
        }
    }

    /// The scrubber or the cleaner has found it.
    pub fn on_found(&self, device: usize, finding: ScrubFinding) {
        let mut all = self.devices();
        all[device].status.bad_blocks += 1;
        all[device].list(finding);
        drop(all);
        self.hand_over(place_of(device as u32, &finding));
    }

    /// A read has met it.
    #[cold]
    pub fn on_read(&self, device: usize, finding: ScrubFinding) {
        let is_new = self.devices()[device].list(finding);
        if is_new {
            self.hand_over(place_of(device as u32, &finding));
        }
    }

    fn hand_over(&self, bad: BadBlock) {
        let mut to_repair = self.to_repair.lock().expect("no panic under this lock");
        if to_repair.len() < QUEUE_MAX {
            to_repair.push(bad);
            self.is_waiting.store(true, Ordering::Release);
        }
    }

    /// What is to be repaired and has not been handed out.
    pub fn take(&self) -> Vec<BadBlock> {
        if !self.is_waiting.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut to_repair = self.to_repair.lock().expect("no panic under this lock");
        self.is_waiting.store(false, Ordering::Release);
        std::mem::take(&mut *to_repair)
    }

    /// What became of one that was handed out.
    pub fn on_outcome(&self, bad: BadBlock, outcome: Outcome) {
        let BadBlock {
            device,
            chunk,
            block,
        } = bad;
        let mut all = self.devices();
        let Some(listed) = all.get_mut(device as usize) else {
            return;
        };
        match outcome {
            Outcome::Repaired { from } => {
                listed.status.repaired_blocks += 1;
                tracing::warn!(
                    device, ?chunk, block, %from,
                    "a bad block has been written again from another replica; replace the device if more \
                     follow"
                );
            }
            Outcome::Readable => tracing::info!(
                device,
                ?chunk,
                block,
                "a bad block has been written again, or freed, by others"
            ),
            Outcome::Left => tracing::info!(
                device,
                ?chunk,
                block,
                "a bad block is not needed any more: its placement group lies elsewhere"
            ),
            Outcome::Stuck => tracing::error!(
                device,
                ?chunk,
                block,
                "no other replica has given a bad block; unless one does yet, restore the volume from a \
                 backup"
            ),
        }
        if outcome == Outcome::Stuck {
            listed.mark_stuck(&bad);
        } else {
            listed.strike(&bad);
        }
    }
}

impl Listed {
    /// True if it was not listed yet.
    fn list(&mut self, finding: ScrubFinding) -> bool {
        let bad = place_of(0, &finding);
        let findings = &mut self.status.findings;
        if let Some(at) = findings.iter().position(|known| is_at(known, &bad)) {
            findings[at] = finding;
            return false;
        }
        if findings.len() < FINDINGS_MAX {
            findings.push(finding);
            self.stuck.push(false);
        } else {
            (self.overflowed, self.status.is_more) = (true, true);
        }
        true
    }

    fn mark_stuck(&mut self, bad: &BadBlock) {
        let findings = self.status.findings.iter();
        for (finding, is_stuck) in findings.zip(&mut self.stuck) {
            *is_stuck |= is_at(finding, bad);
        }
    }

    /// True if it was listed.
    fn strike(&mut self, bad: &BadBlock) -> bool {
        let findings = &mut self.status.findings;
        let Some(at) = findings.iter().position(|finding| is_at(finding, bad)) else {
            return false;
        };
        findings.remove(at);
        self.stuck.remove(at);
        true
    }
}

#[cfg(test)]
mod tests;
