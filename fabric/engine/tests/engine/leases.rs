//! Who may write, and volumes as the control plane handles them.

use fabric::FabricError;
use fabric_types::ids::LayerId;
use fabric_types::io::{IoError, Op};
use fabric_types::{Epoch, Generation};

use super::rig::{Guest, MIB, Rig};

#[test]
fn one_writer_newer_lease_fences_the_older_across_a_reopen() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut old = Guest::open(&fabric, 1, 5, 16 * MIB);
    old.write(0, &[1; 4096]).unwrap();
    let mut new = Guest::open(&fabric, 1, 6, 16 * MIB);
    assert_eq!(old.write(0, &[2; 4096]), Err(IoError::Fenced));
    assert!(new.read_vec(0, 4096).iter().all(|&b| b == 1));
    new.write(0, &[3; 4096]).unwrap();
    drop((old, new));
    drop(fabric);
    let fabric = rig.open();
    for generation in [4, 5] {
        let mut stale = Guest::open(&fabric, 1, generation, 16 * MIB);
        assert_eq!(stale.write(0, &[4; 4096]), Err(IoError::Fenced));
    }
    let mut guest = Guest::open(&fabric, 1, 7, 16 * MIB);
    assert!(guest.read_vec(0, 4096).iter().all(|&b| b == 3));
}

#[test]
fn lease_renewal_causes_no_error_and_orders_after_the_old_lease() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    for n in 1..=5u8 {
        guest.write(0, &[n; 4096]).unwrap();
    }
    fabric
        .renew_lease(&guest.volume, Generation(2), Epoch(1))
        .unwrap();
    guest.write(0, &[9; 4096]).unwrap();
    assert!(guest.read_vec(0, 4096).iter().all(|&b| b == 9));
    let again = fabric.renew_lease(&guest.volume, Generation(2), Epoch(1));
    assert!(matches!(again, Err(FabricError::StaleLease { .. })));
    guest.write(0, &[10; 4096]).unwrap();
}

#[test]
fn write_in_flight_at_a_lease_renewal_orders_before_later_ones() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let mut guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    for n in 1..=5u8 {
        guest.write(0, &[n; 4096]).unwrap();
    }
    let (bytes, volume) = ([6u8; 4096], guest.volume.clone());
    let buffers = [libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }];
    let renew = || {
        fabric
            .renew_lease(&volume, Generation(2), Epoch(1))
            .unwrap();
    };
    let write = Op::Write { fua: false };
    guest.run_late(write, 0, 4096, &buffers, renew).unwrap();
    assert!(guest.read_vec(0, 4096).iter().all(|&b| b == 6));
    guest.write(0, &[7; 4096]).unwrap();
    assert!(guest.read_vec(0, 4096).iter().all(|&b| b == 7));
}

#[test]
fn deleted_volume_frees_its_space_and_its_name_starts_empty() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let empty = fabric.devices()[0].used_bytes;
    let mut guest = Guest::open(&fabric, 1, 5, 64 * MIB);
    guest.write(0, &vec![1; 32 << 20]).unwrap();
    let mut other = Guest::open(&fabric, 2, 1, 64 * MIB);
    other.write(0, &[2; 4096]).unwrap();
    drop(guest);
    fabric.delete_volume(LayerId(1)).unwrap();
    fabric.checkpoint().unwrap();
    let used = fabric.devices()[0].used_bytes;
    assert!(used < empty + 8 * MIB, "{used} of {empty}");
    let mut guest = Guest::open(&fabric, 1, 1, 64 * MIB);
    assert!(guest.read_vec(0, 4096).iter().all(|&b| b == 0));
    assert!(other.read_vec(0, 4096).iter().all(|&b| b == 2));
    fabric.delete_volume(LayerId(77)).unwrap();
}

#[test]
fn closing_with_a_data_thread_at_work_is_refused() {
    let rig = Rig::new(256 * MIB);
    let fabric = rig.open();
    let guest = Guest::open(&fabric, 1, 1, 16 * MIB);
    assert!(matches!(fabric.close(), Err(FabricError::InUse(1))));
    drop(guest);
    fabric.close().unwrap();
    assert!(matches!(fabric.checkpoint(), Err(FabricError::Closed)));
}
