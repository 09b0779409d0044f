//! A store that is nearly full.

use fabric_store::api::StoreError;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::rig::Rig;

/// Writes 64 KiB pieces until the store is full; returns how many went in.
fn fill(rig: &mut Rig) -> u32 {
    for piece in 0..1000 {
        let id = rig.write(piece / 64, piece % 64 * 128, 128, false);
        match rig.run(id) {
            Ok(()) => {}
            Err(StoreError::NoSpace { .. }) => return piece,
            Err(other) => panic!("{other}"),
        }
    }
    panic!("never full");
}

/// Overwriting everything on a nearly full, fragmented store goes on forever.
#[test]
fn a_nearly_full_store_takes_overwrites() {
    let mut rig = Rig::new(12 << 20, 4);
    rig.expect_errors = true;
    let pieces = fill(&mut rig);
    rig.drain();
    let id = rig.zero(pieces / 64, 0, 8192);
    assert_eq!(rig.run(id), Ok(()));
    let id = rig.zero(0, 0, 1024);
    assert_eq!(rig.run(id), Ok(()));
    rig.expect_errors = false;
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for step in 0..4000 {
        let piece = rng.random_range(8..pieces);
        let (chunk, sector) = (piece / 64, piece % 64 * 128 + 8 * rng.random_range(0..16));
        rig.write(chunk, sector, 8, false);
        if step % 50 == 0 {
            rig.read(chunk, piece % 64 * 128, 128);
            rig.flush();
        }
    }
    rig.compare_all();
    rig.check();
    rig.process_crash();
    rig.compare_all();
}
