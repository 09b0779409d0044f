//! Import of compressed images, damaged images, and files that are not images.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;

use crate::harness::{Daemon, eventually, one_error, temp, text};
use crate::images::{image, qemu_img, used};

/// Compresses with one of the formats that import supports.
fn pack(compression: &str, bytes: &[u8]) -> Vec<u8> {
    match compression {
        "gzip" => {
            let level = flate2::Compression::fast();
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), level);
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        "xz" => {
            let options = lzma_rust2::XzOptions::with_preset(0);
            let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        "zstd" => {
            let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
            // The program `zstd` does this too. Without a checksum not all damage is detected.
            encoder.include_checksum(true).unwrap();
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        "bzip2" => {
            let level = bzip2::Compression::fast();
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), level);
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        other => panic!("{other}"),
    }
}

/// Compressions and their usual file extensions.
const COMPRESSIONS: [(&str, &str); 4] = [
    ("gzip", "gz"),
    ("xz", "xz"),
    ("zstd", "zst"),
    ("bzip2", "bz2"),
];

#[test]
fn compressed_images_are_decompressed() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let (raw, qcow2) = (dir.path().join("in.raw"), dir.path().join("in.qcow2"));
    let content = image(&raw);
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    qemu_img(&[&convert[..], &[text(&raw), text(&qcow2)]].concat());
    let empty = used(&daemon);
    for (compression, suffix) in COMPRESSIONS {
        for (path, format) in [(&raw, "raw"), (&qcow2, "qcow2")] {
            let packed = dir.path().join(format!("disk.{suffix}"));
            fs::write(&packed, pack(compression, &fs::read(path).unwrap())).unwrap();
            let imported = daemon.run(&["volume", "import", "a", text(&packed), "--yes"]);
            let output = String::from_utf8_lossy(&imported.stderr).into_owned();
            assert!(imported.status.success(), "{output}");
            let how = format!("is {format}, compressed by {compression}, as detected");
            assert!(output.contains(&how), "{output}");
            let back = daemon.run(&["volume", "export", "a", "-"]).stdout;
            assert!(back == content, "{format} in {compression}");
            daemon.ok(&["volume", "delete", "a", "--yes"]);
        }
    }
    // Zeroes take no space, whatever the compression.
    let packed = dir.path().join("disk.xz");
    fs::write(&packed, pack("xz", &content)).unwrap();
    eventually(|| used(&daemon) <= empty + (1 << 20));
    daemon.ok(&["volume", "import", "a", text(&packed)]);
    assert!(used(&daemon) - empty < 12 << 20);
}

#[test]
fn a_compressed_image_that_cannot_be_decompressed_leaves_nothing() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let raw = dir.path().join("in.raw");
    let content = image(&raw);
    for (compression, suffix) in COMPRESSIONS {
        let whole = pack(compression, &content);
        let mut damaged = whole.clone();
        damaged[whole.len() / 2] ^= 0xff;
        for (bytes, words) in [
            (&whole[..whole.len() - 7], &["was cut off"][..]),
            (&damaged, &["is damaged", "was cut off"]),
        ] {
            let packed = dir.path().join(format!("disk.{suffix}"));
            fs::write(&packed, bytes).unwrap();
            let message = daemon.refused(&["volume", "import", "a", text(&packed)]);
            assert!(words.iter().any(|word| message.contains(word)), "{message}");
            assert!(message.contains(text(&packed)), "{message}");
        }
    }
    assert_eq!(daemon.json(&["volume", "list"]), serde_json::json!([]));
}

/// Creates a tar archive with one file.
fn tar(content: &[u8]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    archive
        .append_data(&mut header, "disk.raw", content)
        .unwrap();
    archive.into_inner().unwrap()
}

#[test]
fn files_that_are_not_disk_images_are_refused_by_name() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let plain = vec![7; 100_000];
    let padded = |signature: &[u8]| [signature, &[0; 4096]].concat();
    for (name, content, what, hint) in [
        (
            "a.zip",
            padded(b"PK\x03\x04"),
            "is a zip archive",
            "unpack it first",
        ),
        ("a.tar", tar(&plain), "is a tar archive", "unpack it first"),
        ("a.ova", tar(&plain), "as an OVA is", "unpack it first"),
        (
            "a.7z",
            padded(b"7z\xbc\xaf\x27\x1c"),
            "is a 7z archive",
            "unpack it first",
        ),
        (
            "a.lz4",
            padded(b"\x04\x22\x4d\x18"),
            "compressed by lz4",
            "decompress it first",
        ),
        (
            "a.vdi",
            [&[0; 64], &padded(b"\x7f\x10\xda\xbe")[..]].concat(),
            "a vdi image",
            "qemu-img",
        ),
        (
            "a.qcow",
            padded(b"QFI\xfb\0\0\0\x01"),
            "a qcow image",
            "qemu-img convert",
        ),
        (
            "a.img",
            padded(b"<!DOCTYPE html>"),
            "an HTML page",
            "where it came from",
        ),
        (
            "a.tar.gz",
            pack("gzip", &tar(&plain)),
            "is a tar archive",
            "unpack it first",
        ),
        (
            "a.gz.xz",
            pack("xz", &pack("gzip", &plain)),
            "compressed again, by gzip",
            "with xz first",
        ),
        (
            "a.vmdk.bz2",
            pack("bzip2", &padded(b"KDMV")),
            "a vmdk image",
            "with bzip2 first",
        ),
    ] {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        let import = ["volume", "import", "a", text(&path)];
        let message = daemon.refused(&import);
        assert!(
            message.contains(what) && message.contains(hint),
            "{message}"
        );
        assert!(message.contains(text(&path)), "{message}");
        // A raw disk may have any content.
        daemon.ok(&[&import[..], &["--format", "raw"]].concat());
        daemon.ok(&["volume", "delete", "a", "--yes"]);
    }
    // A compressed empty file is refused as empty.
    let path = dir.path().join("empty.zst");
    fs::write(&path, pack("zstd", b"")).unwrap();
    let message = one_error(&daemon.run(&["volume", "import", "a", text(&path)]), 2);
    assert!(message.contains("is empty"), "{message}");
}

#[test]
fn a_qcow2_image_that_is_marked_corrupt_needs_force() {
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let (raw, image) = (dir.path().join("in.raw"), dir.path().join("in.qcow2"));
    let content = crate::images::image(&raw);
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    qemu_img(&[&convert[..], &[text(&raw), text(&image)]].concat());
    let file = File::options().read(true).write(true).open(&image).unwrap();
    // Reads the lowest byte of the incompatible features.
    let mut features = [0];
    file.read_exact_at(&mut features, 79).unwrap();
    file.write_all_at(&[features[0] | 2], 79).unwrap();
    let message = daemon.refused(&["volume", "import", "a", text(&image)]);
    assert!(
        message.contains("is marked corrupt") && message.contains("--force"),
        "{message}"
    );
    let forced = daemon.run(&["volume", "import", "a", text(&image), "--force"]);
    let message = String::from_utf8_lossy(&forced.stderr).into_owned();
    assert!(
        forced.status.success() && message.contains("marked corrupt"),
        "{message}"
    );
    assert!(daemon.run(&["volume", "export", "a", "-"]).stdout == content);

    // A truncated image is damaged without the mark.
    file.write_all_at(&features, 79).unwrap();
    file.set_len(fs::metadata(&image).unwrap().len() - (1 << 20))
        .unwrap();
    let import = ["volume", "import", "b", text(&image)];
    let message = daemon.refused(&import);
    assert!(message.contains("--force"), "{message}");
    let forced = daemon.run(&[&import[..], &["--force"]].concat());
    let message = String::from_utf8_lossy(&forced.stderr).into_owned();
    assert!(
        forced.status.success() && message.contains("is damaged"),
        "{message}"
    );
    let back = daemon.run(&["volume", "export", "b", "-"]).stdout;
    assert_eq!(back.len(), content.len());
    assert!(back[..8 << 20] == content[..8 << 20] && back != content);
}

#[test]
fn what_can_be_read_of_a_damaged_qcow2_image_is_imported_with_consent() {
    const CLUSTER_BYTES: usize = 64 << 10;
    const LOST: usize = 20 << 20;
    let dir = temp();
    let daemon = Daemon::start(&dir.path().join("data"));
    let (raw, image) = (dir.path().join("in.raw"), dir.path().join("in.qcow2"));
    let mut content = crate::images::image(&raw);
    let convert = ["convert", "-f", "raw", "-O", "qcow2"];
    qemu_img(&[&convert[..], &[text(&raw), text(&image)]].concat());
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let word = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    // No entry of a table may lead into a cluster.
    let tear = |at: u64| {
        assert_eq!(word(at) & 0xffff, 0);
        file.write_all_at(&(word(at) | 0x200).to_be_bytes(), at)
            .unwrap();
    };
    let offset_of = |entry: u64| entry & 0x00ff_ffff_ffff_fe00;
    let l2_table = offset_of(word(word(40)));
    let refcount_table = word(48);

    for (name, torn) in [
        ("a", l2_table + 8 * (LOST / CLUSTER_BYTES) as u64),
        ("b", refcount_table),
    ] {
        tear(torn);
        content[LOST..LOST + CLUSTER_BYTES].fill(0);
        let import = ["volume", "import", name, text(&image)];
        let error = daemon.refused(&import);
        assert!(
            error.contains("is damaged") && error.contains("--force"),
            "{error}"
        );
        let forced = daemon.run(&[&import[..], &["--force"]].concat());
        let log = String::from_utf8_lossy(&forced.stderr).into_owned();
        assert!(
            forced.status.success() && log.contains("data that cannot be read"),
            "{log}"
        );
        let back = daemon.run(&["volume", "export", name, "-"]).stdout;
        assert!(back == content, "{name}: {log}");
    }
}
