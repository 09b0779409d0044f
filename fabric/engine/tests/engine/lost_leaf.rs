//! Damage to a map page without another replica: its blocks are bad until they are overwritten, and listed
//! as such.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use fabric::{Fabric, ScrubStatus};
use fabric_store::testing::map_pages::MapPages;
use fabric_types::block::BLOCK_BYTES;
use fabric_types::io::IoError;

use super::rig::{Guest, MIB, Rig};

const WAIT_MAX: Duration = Duration::from_secs(60);

fn wait_for(fabric: &Fabric, wanted: impl Fn(&ScrubStatus) -> bool) -> ScrubStatus {
    let start = Instant::now();
    loop {
        let status = fabric.devices().remove(0).scrub;
        if wanted(&status) {
            return status;
        }
        assert!(start.elapsed() < WAIT_MAX, "{status:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn overwriting_what_a_damaged_map_page_mapped_ends_the_damage() {
    let rig = Rig::new(128 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    for at in [0, MIB, 5 * MIB] {
        guest.write(at, &[7; BLOCK_BYTES]).unwrap();
    }
    drop(guest);
    fabric.close().unwrap();
    drop(fabric);
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&rig.device)
        .unwrap();
    let pages = MapPages::read(&|offset| {
        let mut page = [0; BLOCK_BYTES];
        device.read_exact_at(&mut page, offset).unwrap();
        page
    });
    let page = pages
        .leaves
        .iter()
        .find(|page| (page.chunk, page.leaf) == (0, 1));
    device
        .write_all_at(&[0xff; 64], page.unwrap().offset)
        .unwrap();
    drop(device);

    let mut config = rig.config();
    config.scrub.enabled = true;
    config.scrub.start_after_seconds = 0;
    config.scrub.pause_seconds = 0;
    let fabric = crate::single_node::open(config);
    // No other replica can give them.
    let is_lost = |status: &ScrubStatus| !status.lost.is_empty() && status.lost == status.findings;
    let found = wait_for(&fabric, is_lost);
    assert_eq!((found.findings[0].chunk, found.findings[0].block), (0, 256));
    let mut guest = Guest::open(&fabric, 1, 2, 16 * MIB);
    let mut block = [0; BLOCK_BYTES];
    assert_eq!(guest.read(MIB, &mut block), Err(IoError::Corrupt));
    assert_eq!(
        guest.read(2 * MIB - 4096, &mut block),
        Err(IoError::Corrupt)
    );
    assert_eq!(guest.read_vec(0, BLOCK_BYTES), [7; BLOCK_BYTES]);
    assert_eq!(guest.read_vec(2 * MIB, BLOCK_BYTES), [0; BLOCK_BYTES]);
    // Half of it is written, the rest discarded.
    guest.write(MIB, &vec![9; MIB as usize / 2]).unwrap();
    wait_for(&fabric, |status| status.findings.len() == 128);
    guest.discard(3 * MIB / 2, MIB / 2).unwrap();
    let whole = wait_for(&fabric, |status| status.findings.is_empty());
    assert!(whole.lost.is_empty());
    assert_eq!(
        guest.read_vec(MIB, MIB as usize / 2),
        vec![9; MIB as usize / 2]
    );
    assert_eq!(
        guest.read_vec(3 * MIB / 2, MIB as usize / 2),
        vec![0; MIB as usize / 2]
    );
    let passes = wait_for(&fabric, |_| true).passes;
    let later = wait_for(&fabric, |status| status.passes >= passes + 2);
    assert!(later.findings.is_empty());
    drop(guest);
    fabric.close().unwrap();
}
