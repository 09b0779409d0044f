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
        let mut pool = SegmentPool::new();
        let mut cutter = Cutter::new(&iovecs);
        let mut at = 0x10_000;
        for bytes in [first, total - first] {
            let mut to = Segments::new();
            pool.fill(&mut to, &mut cutter, bytes).unwrap();
            for (base, len) in bytes_of(&to) {
                prop_assert_eq!(base, at);
                at += len;
            }
            pool.clear(&mut to);
        }
        prop_assert_eq!(at, 0x10_000 + total);
        prop_assert!(pool.classes.iter().zip(CLASSES).all(|(c, (_, n))| c.free.len() == n));
    }
}

#[test]
fn a_list_shorter_than_announced_is_malformed() {
    let iovecs = list(&[512, 512]);
    let mut pool = SegmentPool::new();
    let mut to = Segments::new();
    let result = pool.fill(&mut to, &mut Cutter::new(&iovecs), 1025);
    assert_eq!(result, Err(NoRoom::Malformed));
    let one = list(&[512]);
    let result = pool.fill(&mut to, &mut Cutter::new(&one), 1024);
    assert_eq!(result, Err(NoRoom::Malformed));
}

#[test]
fn pools_run_dry_and_refill() {
    let iovecs = list(&[512; 1000]);
    let mut pool = SegmentPool::new();
    let mut taken = Vec::new();
    loop {
        let mut to = Segments::new();
        match pool.fill(&mut to, &mut Cutter::new(&iovecs), 512_000) {
            Ok(()) => taken.push(to),
            Err(error) => {
                assert_eq!(error, NoRoom::Busy);
                break;
            }
        }
    }
    assert_eq!(taken.len(), CLASSES[2].1);
    pool.clear(&mut taken[0]);
    let mut again = Segments::new();
    assert_eq!(
        pool.fill(&mut again, &mut Cutter::new(&iovecs), 512_000),
        Ok(())
    );
    let long = list(&[1; SEGMENTS_MAX + 2]);
    let mut to = Segments::new();
    let result = pool.fill(&mut to, &mut Cutter::new(&long), SEGMENTS_MAX + 2);
    assert_eq!(result, Err(NoRoom::Malformed));
}
