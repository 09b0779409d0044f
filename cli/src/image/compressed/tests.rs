use std::io::Write;
use std::os::unix::fs::MetadataExt;

use super::*;

const ALL: [Compression; 4] = [
    Compression::Gzip,
    Compression::Xz,
    Compression::Zstd,
    Compression::Bzip2,
];
const LIMITS: Limits = Limits {
    bytes_max: 1 << 30,
    reserve_bytes: 0,
};
/// Data ranges of [`image`]; all else is zero.
const DATA: [(usize, usize); 3] = [(0, 700), (3_000_001, 1 << 18), (8_000_000 - 9, 9)];

/// An image with unaligned data that does not compress well.
fn image() -> Vec<u8> {
    let mut image = vec![0; 8_000_000];
    let mut state = 1_u32;
    for (from, len) in DATA {
        for byte in &mut image[from..from + len] {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8 | 1;
        }
    }
    image
}

fn pack(compression: Compression, bytes: &[u8]) -> Vec<u8> {
    match compression {
        Compression::Gzip => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Default::default());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Xz => {
            let options = lzma_rust2::XzOptions::with_preset(1);
            let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Zstd => {
            let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
            encoder.include_checksum(true).unwrap();
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        Compression::Bzip2 => {
            let level = bzip2::Compression::fast();
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), level);
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
    }
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    // Writing leaves the position at the end of the file, which must not matter.
    file.write_all(bytes).unwrap();
    file
}

fn expand(compression: Compression, packed: &[u8], limits: Limits) -> Result<File> {
    let target = tempfile::tempfile().unwrap();
    let file = file(packed);
    let packed = Packed {
        file: &file,
        shown: "disk.img.packed",
        compression,
    };
    let bytes = packed.expand(&target, limits, |_| {})?;
    assert_eq!(target.metadata().unwrap().len(), bytes);
    Ok(target)
}

fn content(file: &File) -> Vec<u8> {
    let mut content = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut content, 0).unwrap();
    content
}

fn refused(compression: Compression, packed: &[u8], limits: Limits) -> String {
    let failure = expand(compression, packed, limits).unwrap_err();
    let message = failure.to_string();
    assert!(message.contains("disk.img.packed"), "{message}");
    assert!(failure.hint.is_some(), "{message}");
    message
}

#[test]
fn an_image_is_restored_with_holes_for_zeroes() {
    let image = image();
    for compression in ALL {
        let packed = pack(compression, &image);
        assert_eq!(Compression::of(&packed), Some(compression));
        let target = expand(compression, &packed, LIMITS).unwrap();
        assert!(content(&target) == image, "{compression:?}");
        let stored = target.metadata().unwrap().blocks() * 512;
        assert!(stored < 1 << 20, "{compression:?}: {stored} bytes");
    }
}

#[test]
fn concatenated_streams_are_one_image() {
    let image = image();
    let (one, other) = image.split_at(3_100_000);
    for compression in ALL {
        let packed = [pack(compression, one), pack(compression, other)].concat();
        let target = expand(compression, &packed, LIMITS).unwrap();
        assert!(content(&target) == image, "{compression:?}");
    }
    // pzstd writes a skippable frame first.
    let skipped = [&[0x5a, 0x2a, 0x4d, 0x18, 4, 0, 0, 0], &[9; 4][..]].concat();
    let packed = [skipped, pack(Compression::Zstd, &image)].concat();
    let target = expand(Compression::Zstd, &packed, LIMITS).unwrap();
    assert!(content(&target) == image);
}

#[test]
fn zeroes_after_the_last_stream_are_padding() {
    let image = image();
    let (one, other) = image.split_at(3_100_000);
    // xz has a rule for padding, multiples of 4 bytes; zstd has none, and `zstd -t` refuses it.
    for compression in [Compression::Gzip, Compression::Xz, Compression::Bzip2] {
        let packed = [pack(compression, one), pack(compression, other)].concat();
        for zeroes in [4, 512, PIECE_BYTES * 2] {
            let padded = [&packed[..], &vec![0; zeroes]].concat();
            let target = expand(compression, &padded, LIMITS).unwrap();
            assert!(content(&target) == image, "{compression:?}, {zeroes}");

            let followed = [&padded[..], b"something else, longer than a header"].concat();
            let error = refused(compression, &followed, LIMITS);
            assert!(error.contains("is damaged"), "{compression:?}: {error}");
        }
    }
}

#[test]
fn an_image_that_was_cut_off_is_refused_wherever_it_was() {
    let image = image();
    for compression in ALL {
        let packed = pack(compression, &image);
        for kept in [1, 5, 20, 1000, packed.len() / 2, packed.len() - 1] {
            let message = refused(compression, &packed[..kept], LIMITS);
            assert!(
                message.contains("was cut off"),
                "{compression:?}, {kept}: {message}"
            );
        }
    }
}

#[test]
fn a_damaged_image_is_refused() {
    let image = image();
    for compression in ALL {
        let packed = pack(compression, &image);
        for at in [packed.len() / 3, packed.len() - 6] {
            let mut packed = packed.clone();
            packed[at] ^= 0x55;
            let message = refused(compression, &packed, LIMITS);
            let name = compression.name();
            assert!(
                message.contains("is damaged") || message.contains("was cut off"),
                "{at}: {message}"
            );
            assert!(message.contains(&format!("`{name} -t")), "{message}");
        }
        // Trailing bytes after the end.
        let packed = [&packed[..], &b"something else, longer than any header"[..]].concat();
        let message = refused(compression, &packed, LIMITS);
        assert!(message.contains("is damaged"), "{compression:?}: {message}");
    }
}

#[test]
fn an_image_that_decompresses_to_too_much_is_refused() {
    for compression in ALL {
        let packed = pack(compression, &vec![0; 5 << 20]);
        assert!(packed.len() < 64 << 10);
        let limits = |bytes_max| Limits {
            bytes_max,
            ..LIMITS
        };
        let message = refused(compression, &packed, limits((5 << 20) - 1));
        assert!(message.contains("decompresses to more than"), "{message}");
        expand(compression, &packed, limits(5 << 20)).unwrap();
        // Zeroes take no space. Data must leave the reserve free.
        let reserve = Limits {
            reserve_bytes: u64::MAX,
            ..LIMITS
        };
        expand(compression, &packed, reserve).unwrap();
        let message = refused(compression, &pack(compression, &[1; 9000]), reserve);
        assert!(message.contains("no space to decompress"), "{message}");
    }
}

#[test]
fn a_window_beyond_the_limit_is_refused_before_memory_is_allocated() {
    // A frame with a window of 256 MiB and a block of zeroes.
    let header = [0x28, 0xb5, 0x2f, 0xfd, 0, 18 << 3];
    let zeroes = 4096_u32 << 3 | 1 << 1 | 1;
    let frame = [&header[..], &zeroes.to_le_bytes()[..3], &[0]].concat();
    let message = refused(Compression::Zstd, &frame, LIMITS);
    assert!(message.contains("than its limit, 128M"), "{message}");
    let mut within = frame;
    within[5] = 17 << 3;
    let target = expand(Compression::Zstd, &within, LIMITS).unwrap();
    assert_eq!(content(&target), [0; 4096]);

    let mut options = lzma_rust2::XzOptions::with_preset(0);
    options.lzma_options.dict_size = 1 << 20;
    let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
    encoder.write_all(&[7; 9000]).unwrap();
    let packed = encoder.finish().unwrap();
    expand(Compression::Xz, &packed, LIMITS).unwrap();
    // The same block with a dictionary of 1.5 GiB.
    let packed = with_dictionary(packed, 37);
    let message = refused(Compression::Xz, &packed, LIMITS);
    assert!(message.contains("than its limit, 256M"), "{message}");
}

/// Changes the dictionary in the only block's header of an xz stream, and the header's checksum.
fn with_dictionary(mut packed: Vec<u8>, dictionary: u8) -> Vec<u8> {
    let header = 12;
    let bytes = (usize::from(packed[header]) + 1) * 4;
    let lzma2 = [0x21, 1];
    let block = &packed[header..header + bytes];
    let at = block.windows(2).position(|two| two == lzma2).unwrap();
    packed[header + at + 2] = dictionary;
    let end = header + bytes - 4;
    let mut checksum = flate2::Crc::new();
    checksum.update(&packed[header..end]);
    packed[end..end + 4].copy_from_slice(&checksum.sum().to_le_bytes());
    packed
}

#[test]
fn arbitrary_bytes_are_refused_or_decompressed() {
    let mut state = 7_u32;
    for compression in ALL {
        let packed = pack(compression, &image()[..100_000]);
        for _ in 0..200 {
            let mut packed = packed.clone();
            for _ in 0..3 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let at = (state >> 8) as usize % packed.len();
                packed[at] = (state >> 3) as u8;
            }
            // Must not panic, and must not exceed the limits.
            let _ = expand(compression, &packed, LIMITS);
        }
    }
}
