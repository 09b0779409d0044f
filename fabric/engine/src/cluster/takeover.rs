//! The shell around the machine of a takeover
//! ([`lease_recovery::takeover`](fabric_replication::lease_recovery::takeover)): it goes on in the
//! background, and guests' requests wait until it is done.

use std::sync::{Arc, Weak};

use fabric_replication::lease_recovery::Call;
use fabric_replication::lease_recovery::takeover::{Action, Takeover as Machine};
use fabric_replication::volume::VolumeState;
use fabric_types::Refusal;

use super::requests::Requests;
use super::{Cluster, Map, MetaRequest};

/// A takeover and one of its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Token {
    number: u64,
    call: u32,
}

/// A volume that is being taken over.
pub struct Takeover {
    /// Tells it from the others.
    number: u64,
    volume: Weak<VolumeState>,
    machine: Machine,
}

impl Takeover {
    /// Of a volume that was opened.
    pub fn new(number: u64, volume: &Arc<VolumeState>) -> Self {
        Self {
            number,
            volume: Arc::downgrade(volume),
            machine: Machine::new(volume.layer(), volume.generation(), volume.epoch()),
        }
    }

    /// The map changed.
    pub fn on_map(&mut self, map: &Map) {
        if let Some(volume) = self.volume.upgrade() {
            let size_bytes = volume.size_bytes();
            self.machine.on_map(map.epoch, &map.sets, size_bytes);
        }
    }

    /// Some milliseconds have passed.
    pub fn on_tick(&mut self) {
        self.machine.on_tick();
    }

    /// An answer, if it is to this one.
    pub fn on_reply(&mut self, token: Token, result: Result<(), Refusal>) {
        if token.number == self.number {
            self.machine.on_reply(Call(token.call), result);
        }
    }

    /// Does what is to be done now.
    pub fn go_on(&mut self, requests: &mut Requests<Token>, cluster: &Cluster) {
        // If the volume was closed, what was asked is waited for, and nothing more is begun.
        while let Some(volume) = self.volume.upgrade() {
            let Some(action) = self.machine.poll() else {
                return;
            };
            match action {
                Action::Ask { call, to, request } => {
                    let token = Token {
                        number: self.number,
                        call: call.0,
                    };
                    if let Some(result) = requests.send(to, &request, token) {
                        self.on_reply(token, result);
                    }
                }
                Action::ReportFailed { pg, node, epoch } => {
                    cluster.ask(MetaRequest::ReportFailed { pg, node, epoch });
                }
                Action::Done(epoch) => {
                    volume.set_epoch(epoch);
                    self.end(&volume, "taken over");
                }
                // Replicas refuse whatever is sent under this lease, and say why.
                Action::Fenced => self.end(&volume, "there is a newer lease"),
            }
        }
    }

    fn end(&self, volume: &VolumeState, how: &'static str) {
        tracing::info!(
            layer = volume.layer().0,
            generation = self.machine.generation().0,
            recovered = self.machine.recovered_blocks(),
            how,
            "volume"
        );
        volume.end_recovery(self.machine.generation());
    }

    /// Whether nothing more comes of it, and nobody uses its memory.
    pub fn is_over(&self) -> bool {
        let ended = self.machine.is_over() || self.volume.strong_count() == 0;
        ended && self.machine.calls_due() == 0
    }
}
