//! The sorts of problems, by the words that an operator looks them up by.

/// Declares the sorts, their words, and the list of all.
macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident $word:literal)*) => {
        /// A sort of problem. docs/RUNBOOK.md has a section for each, with its word as the heading.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Code {
            $($(#[$doc])* $name,)*
        }

        impl Code {
            /// All of them.
            #[cfg(test)]
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Its word.
            pub fn word(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)*
                }
            }
        }
    };
}

codes! {
    /// The daemon starts.
    Starting "starting"
    /// No leader is heard of.
    LeaderMissed "leader-missed"
    /// Too few nodes vote on metadata.
    VotersLacking "voters-lacking"
    /// One of two nodes votes on metadata.
    SingleVoter "single-voter"
    /// The metadata on this node do not go on.
    MetadataService "metadata-service"
    /// An operator has to say which replicas count.
    ReplicasToChoose "replicas-to-choose"
    /// Data of volumes are kept that the metadata do not know.
    UnknownVolumes "unknown-volumes"
    /// Nodes are of several versions.
    Upgrade "upgrade"
    /// A node joined and was never started.
    NodeNotStarted "node-not-started"
    /// A node is not heard of.
    NodeDown "node-down"
    /// A node is being emptied.
    NodeEmptying "node-emptying"
    /// A device gave errors.
    DeviceFailed "device-failed"
    /// A node runs without a device.
    DeviceOffline "device-offline"
    /// The same, told by the node.
    DeviceLeftOut "device-left-out"
    /// The file of a device that is open was removed.
    DeviceFileGone "device-file-gone"
    /// Devices do not answer.
    DevicesSilent "devices-silent"
    /// A device has no room.
    DeviceFull "device-full"
    /// The file system under a device file has no room.
    HostFilesystemShort "host-filesystem-short"
    /// Blocks cannot be read.
    DataDamaged "data-damaged"
    /// Replicas cannot be brought up to date.
    SyncFailing "sync-failing"
    /// Replicas on this node do not get on.
    SyncStalled "sync-stalled"
    /// A device is being emptied.
    DeviceEmptying "device-emptying"
    /// Writes are dropped.
    NullStore "null-store"
    /// Writes to a pool wait.
    PoolWaiting "pool-waiting"
    /// A pool lacks replicas.
    PoolDegraded "pool-degraded"
    /// A pool has no place for all replicas.
    PoolLacking "pool-lacking"
    /// A pool has little room left.
    PoolFilling "pool-filling"
    /// A pool's volumes may outgrow its devices.
    PoolOverCommitted "pool-over-committed"
    /// Data of a pool move.
    PoolMoving "pool-moving"
    /// A guest's device does not work.
    AttachmentNotServed "attachment-not-served"
    /// Nobody can connect to an attachment.
    AttachmentUnreachable "attachment-unreachable"
    /// Another node may write a volume.
    LeaseLost "lease-lost"
    /// Writes wait for space.
    WritesWait "writes-wait"
    /// A change of a volume is not finished.
    VolumeUnfinished "volume-unfinished"
    /// Clients of an NFS export wait.
    ExportNotServed "export-not-served"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runbook_has_a_section_for_each_sort_of_problem() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/RUNBOOK.md");
        let text = std::fs::read_to_string(path).unwrap();
        let sections: Vec<(&str, &str)> = text
            .split("\n### ")
            .skip(1)
            .map(|section| section.split_once('\n').unwrap())
            .collect();
        let mut headings: Vec<&str> = sections.iter().map(|(heading, _)| *heading).collect();
        let mut words: Vec<&str> = Code::ALL.iter().map(|code| code.word()).collect();
        headings.sort_unstable();
        words.sort_unstable();
        assert_eq!(headings, words);
        for (heading, body) in sections {
            for part in ["**Means.**", "**Look at.**", "**Do.**"] {
                assert!(body.contains(part), "{heading} lacks {part}");
            }
        }
    }
}
