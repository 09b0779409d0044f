//! Looks at what a node's devices hold, beside its data path. Its stores must be idle.

use fabric_replication::repair::queue::BadBlock;
use fabric_types::block::BlockStamp;
use fabric_types::ids::ChunkKey;

use super::{Node, Outputs};

impl Node {
    /// Reads a range of a chunk on a device, for comparing nodes.
    ///
    /// # Errors
    /// What the store says when it cannot read it.
    pub fn peek(
        &mut self,
        device: usize,
        chunk: ChunkKey,
        range: (u32, u32),
    ) -> Result<Vec<u8>, String> {
        let process = self.process.as_mut().expect("it runs");
        let disk = &mut self.devices[device].disk;
        process.port.stores[device].peek(disk, chunk, range)
    }

    /// What the blocks of a chunk on a device are, as its map tells.
    ///
    /// # Errors
    /// What the store says when it cannot read its map.
    pub fn stamps(&mut self, device: usize, chunk: ChunkKey) -> Result<Vec<BlockStamp>, String> {
        let process = self.process.as_mut().expect("it runs");
        let disk = &mut self.devices[device].disk;
        process.port.stores[device].stamps(disk, chunk)
    }

    /// Gives a block another content with a checksum that fits, and the version that it has; false if the
    /// device has no room for it.
    ///
    /// # Errors
    /// What the store says when it cannot.
    pub fn forge(&mut self, device: usize, chunk: ChunkKey, block: u32) -> Result<bool, String> {
        let process = self.process.as_mut().expect("it runs");
        let disk = &mut self.devices[device].disk;
        process.port.stores[device].forge(disk, chunk, block)
    }

    /// What a scrubber finds bad on all devices, which nobody is told of; nothing if no process runs.
    pub fn find_bad(&mut self) -> Vec<BadBlock> {
        let Some(process) = &mut self.process else {
            return Vec::new();
        };
        let mut found = Vec::new();
        let stores = process.port.stores.iter_mut().zip(&mut self.devices);
        for (index, (store, device)) in (0..).zip(stores) {
            let bad = store.scrub(&mut device.disk).into_iter();
            found.extend(bad.map(|finding| BadBlock {
                device: index,
                chunk: ChunkKey {
                    layer: finding.layer,
                    index: finding.chunk,
                },
                block: finding.block,
            }));
        }
        found
    }

    /// The scrubber reads every block once; how many it finds bad. Those are to be repaired.
    pub fn scrub(&mut self, outputs: &mut Outputs) -> usize {
        let bad = self.find_bad();
        if let Some(process) = &mut self.process {
            process.on_bad_blocks(&bad, outputs.now_us);
        }
        self.pump(outputs);
        bad.len()
    }
}
