use proptest::prelude::*;

use super::*;

fn list(lens: &[usize]) -> Vec<libc::iovec> {
    let mut at = 0x10_000usize;
    lens.iter()
        .map(|&len| {
            let iov = libc::iovec {
                iov_base: std::ptr::without_provenance_mut(at),
                iov_len: len,
            };
            at += len;
            iov
        })
        .collect()
}

fn bytes_of(list: &Segments) -> Vec<(usize, usize)> {
    let v = list.as_iovecs();
    // SAFETY: the list was just filled and has not moved.
    let v = unsafe { std::slice::from_raw_parts(v.ptr, v.len as usize) };
    v.iter().map(|i| (i.iov_base.addr(), i.iov_len)).collect()
}

proptest! {
    /// The guest's buffers lie one after the other here, so a cut must cover consecutive addresses.
    #[test]
    fn cuts_cover_the_list_once_in_order(
        lens in prop::collection::vec(1..9000usize, 1..300),
        cut_at in 0.0..1.0f64,
    ) {
        let total: usize = lens.iter().sum();
        let first = (total as f64 * cut_at) as usize;
        let iovecs = list(&lens);
        let (mut pool, mut held) = (SegmentPool::new(), ArraysHeld::default());
        let mut cutter = Cutter::new(&iovecs);
        let mut at = 0x10_000;
        for bytes in [first, total - first] {
            let mut to = Segments::new();
            pool.fill(&mut to, &mut cutter, bytes, &mut held).unwrap();
            for (base, len) in bytes_of(&to) {
                prop_assert_eq!(base, at);
                at += len;
            }
            pool.clear(&mut to, &mut held);
        }
        prop_assert_eq!(at, 0x10_000 + total);
        prop_assert!(held.is_empty());
        prop_assert!(pool.classes.iter().zip(CLASSES).all(|(c, (_, n))| c.free.len() == n));
    }
}

#[test]
fn a_list_shorter_than_announced_is_malformed() {
    let iovecs = list(&[512, 512]);
    let (mut pool, mut held) = (SegmentPool::new(), ArraysHeld::default());
    let mut to = Segments::new();
    let result = pool.fill(&mut to, &mut Cutter::new(&iovecs), 1025, &mut held);
    assert_eq!(result, Err(ListRefusal::Malformed));
    let one = list(&[512]);
    let result = pool.fill(&mut to, &mut Cutter::new(&one), 1024, &mut held);
    assert_eq!(result, Err(ListRefusal::Malformed));
}

/// Takes arrays of 1,000 elements for one user until there is none for it.
fn take_all(pool: &mut SegmentPool, held: &mut ArraysHeld) -> Vec<Segments> {
    let iovecs = list(&[512; 1000]);
    let mut taken = Vec::new();
    loop {
        let mut to = Segments::new();
        held.begin_request();
        match pool.fill(&mut to, &mut Cutter::new(&iovecs), 512_000, held) {
            Ok(()) => taken.push(to),
            Err(error) => {
                assert_eq!(error, ListRefusal::Busy);
                return taken;
            }
        }
    }
}

#[test]
fn pools_run_dry_and_refill() {
    let mut pool = SegmentPool::new();
    let mut users = vec![];
    while users.len() < CLASSES[2].1 {
        let mut held = ArraysHeld::default();
        let taken = take_all(&mut pool, &mut held);
        if taken.is_empty() {
            break;
        }
        users.push((taken, held));
    }
    let taken: usize = users.iter().map(|(taken, _)| taken.len()).sum();
    assert_eq!(taken, CLASSES[2].1);
    let (lists, held) = &mut users[0];
    pool.clear(&mut lists[0], held);
    let mut held = ArraysHeld::default();
    assert_eq!(take_all(&mut pool, &mut held).len(), 1);
    let long = list(&[1; SEGMENTS_MAX + 2]);
    let mut to = Segments::new();
    let result = pool.fill(
        &mut to,
        &mut Cutter::new(&long),
        SEGMENTS_MAX + 2,
        &mut held,
    );
    assert_eq!(result, Err(ListRefusal::Malformed));
}

#[test]
fn a_user_that_takes_all_it_can_leaves_arrays_for_another() {
    let mut pool = SegmentPool::new();
    let mut greedy = ArraysHeld::default();
    assert_eq!(take_all(&mut pool, &mut greedy).len(), CLASSES[2].1 / 2);
    assert!(!take_all(&mut pool, &mut ArraysHeld::default()).is_empty());
}
