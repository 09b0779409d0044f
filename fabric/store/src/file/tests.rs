use super::*;

/// A directory on a file system with direct I/O: where the build is, not `/tmp`, which may be a tmpfs.
fn dir() -> tempfile::TempDir {
    let exe = std::env::current_exe().expect("a test has a path");
    tempfile::tempdir_in(exe.parent().expect("it lies in a directory"))
        .expect("a writable build directory")
}

/// Memory aligned for direct I/O.
#[repr(align(4096))]
struct Block([u8; BLOCK_BYTES]);

#[test]
fn a_created_file_keeps_what_was_written() {
    let dir = dir();
    let path = dir.path().join("dev");
    let mut device = DeviceFile::create(&path, 1 << 20, Allocation::Preallocated).unwrap();
    assert_eq!(device.capacity_bytes(), 1 << 20);
    assert_eq!(device.kind(), DeviceKind::File);
    device.write_at(8192, &Block([7; BLOCK_BYTES]).0).unwrap();
    device.flush().unwrap();
    drop(device);
    let mut device = DeviceFile::open(&path).unwrap();
    let mut block = Block([0; BLOCK_BYTES]);
    device.read_at(8192, &mut block.0).unwrap();
    assert!(block.0.iter().all(|&b| b == 7));
    let past_the_end = device.read_at(1 << 20, &mut block.0).unwrap_err();
    assert_eq!(past_the_end.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_second_opener_is_told_that_the_device_is_in_use() {
    let dir = dir();
    let path = dir.path().join("dev");
    let first = DeviceFile::create(&path, 1 << 20, Allocation::Sparse).unwrap();
    let error = DeviceFile::open(&path).unwrap_err();
    assert!(
        matches!(&error, DeviceError::InUse(p) if *p == path),
        "{error}"
    );
    drop(first);
    DeviceFile::open(&path).unwrap();
}

#[test]
fn wrong_paths_are_named_and_nothing_is_left_behind() {
    let dir = dir();
    let path = dir.path().join("dev");
    assert!(matches!(
        DeviceFile::open(&path),
        Err(DeviceError::Missing(_))
    ));
    assert!(matches!(
        DeviceFile::open(dir.path()),
        Err(DeviceError::Kind(_))
    ));
    let huge = DeviceFile::create(&path, 1 << 60, Allocation::Preallocated);
    assert!(matches!(huge, Err(DeviceError::NoSpace { .. })), "{huge:?}");
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    let exists = DeviceFile::create(&path, 1 << 20, Allocation::Sparse);
    assert!(matches!(exists, Err(DeviceError::Exists(_))), "{exists:?}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn a_file_system_without_direct_io_is_refused() {
    // procfs files refuse O_DIRECT on every kernel.
    let error = DeviceFile::open(Path::new("/proc/self/comm")).unwrap_err();
    assert!(matches!(error, DeviceError::NoDirectIo(_)), "{error}");
}

#[test]
fn a_written_file_has_all_its_blocks_and_reads_as_zeroes() {
    use std::os::unix::fs::MetadataExt;
    let dir = dir();
    let path = dir.path().join("dev");
    let size = (2 << 20) + 12288;
    let mut device = DeviceFile::create(&path, size, Allocation::Written).unwrap();
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= size);
    let mut block = Block([1; BLOCK_BYTES]);
    device
        .read_at(size - BLOCK_BYTES as u64, &mut block.0)
        .unwrap();
    assert!(block.0.iter().all(|&b| b == 0));
    let sparse = dir.path().join("sparse");
    DeviceFile::create(&sparse, size, Allocation::Sparse).unwrap();
    assert_eq!(std::fs::metadata(&sparse).unwrap().blocks(), 0);
}

#[test]
fn handle_reads_many_ranges_at_once_and_reports_a_failed_one() {
    let dir = dir();
    let path = dir.path().join("dev");
    // More reads than the ring has room for.
    let blocks = 3 * crate::uring::DEPTH as usize / 2;
    let size_bytes = (blocks * BLOCK_BYTES) as u64;
    let mut device = DeviceFile::create(&path, size_bytes, Allocation::Preallocated).unwrap();
    for at in 0..blocks {
        let block = Block([at as u8; BLOCK_BYTES]);
        device
            .write_at((at * BLOCK_BYTES) as u64, &block.0)
            .unwrap();
    }
    let mut handle = device.handle().expect("a ring can be had");
    assert_eq!(handle.capacity_bytes(), size_bytes);
    let mut read: Vec<Block> = (0..blocks).map(|_| Block([0xee; BLOCK_BYTES])).collect();
    let mut reads: Vec<_> = read
        .iter_mut()
        .enumerate()
        .map(|(at, block)| ReadAt {
            offset: ((blocks - 1 - at) * BLOCK_BYTES) as u64,
            buf: &mut block.0,
        })
        .collect();
    handle.read_many(&mut reads).unwrap();
    reads[7].offset = size_bytes;
    assert!(handle.read_many(&mut reads).is_err(), "past the end");
    reads[7].offset = 0;
    handle.read_many(&mut reads).unwrap();
    assert!(read[7].0.iter().all(|&b| b == 0));
    for (at, block) in read.iter().enumerate().filter(|(at, _)| *at != 7) {
        assert!(block.0.iter().all(|&b| b == (blocks - 1 - at) as u8));
    }
}
