//! Image formats, as far as import has to know them before qemu-img sees the image: which one it is, and
//! for qcow2 whether the image stands alone. qemu-img is never asked to guess: a format that it finds by
//! itself may make it open other files that the image names.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::args::ImageFormat;

use super::compressed::Compression;

/// Bytes that tell the format: all signatures that are known lie in them.
const HEAD_BYTES: usize = 512;
/// Steps that turn a file into an image that import accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remedy {
    /// An image in another format: qemu-img converts it.
    Convert,
    /// An archive that contains the image.
    Unpack,
    /// Compressed in an unsupported format.
    Decompress,
    /// Not an image.
    Replace,
}

use Remedy::{Convert, Decompress, Replace, Unpack};

/// Where a signature begins, and its bytes.
type Signature = (usize, &'static [u8]);

/// Formats that import does not take, by their signatures.
const SIGNATURES: &[(&str, Remedy, &[Signature])] = &[
    ("a qed image", Convert, &[(0, b"QED\0")]),
    (
        "a vmdk image",
        Convert,
        &[(0, b"KDMV"), (0, b"COWD"), (0, b"# Disk DescriptorFile")],
    ),
    ("a vpc image", Convert, &[(0, b"conectix")]),
    ("a vhdx image", Convert, &[(0, b"vhdxfile")]),
    ("a vdi image", Convert, &[(0x40, b"\x7f\x10\xda\xbe")]),
    ("a luks image", Convert, &[(0, b"LUKS\xba\xbe")]),
    (
        "a parallels image",
        Convert,
        &[(0, b"WithoutFreeSpace"), (0, b"WithouFreSpacExt")],
    ),
    ("a bochs image", Convert, &[(0, b"Bochs Virtual HD Image")]),
    (
        "a cloop image",
        Convert,
        &[(0, b"#!/bin/sh\n#V2.0 Format\n")],
    ),
    (
        "an Android sparse image",
        Decompress,
        &[(0, b"\x3a\xff\x26\xed")],
    ),
    ("a zip archive", Unpack, &[(0, b"PK\x03\x04")]),
    ("an empty zip archive", Unpack, &[(0, b"PK\x05\x06")]),
    ("a zip archive in parts", Unpack, &[(0, b"PK\x07\x08")]),
    ("a tar archive, as an OVA is", Unpack, &[(257, b"ustar")]),
    ("a 7z archive", Unpack, &[(0, b"7z\xbc\xaf\x27\x1c")]),
    ("a rar archive", Unpack, &[(0, b"Rar!\x1a\x07")]),
    (
        "an ar archive, as a Debian package is",
        Unpack,
        &[(0, b"!<arch>\n")],
    ),
    (
        "a cpio archive",
        Unpack,
        &[
            (0, b"070701"),
            (0, b"070702"),
            (0, b"070707"),
            (0, b"\xc7\x71"),
        ],
    ),
    ("an RPM package", Unpack, &[(0, b"\xed\xab\xee\xdb")]),
    ("a cabinet archive", Unpack, &[(0, b"MSCF\0\0\0\0")]),
    ("a wim archive", Unpack, &[(0, b"MSWIM\0\0\0")]),
    ("a xar archive", Unpack, &[(0, b"xar!")]),
    (
        "compressed by lz4",
        Decompress,
        &[(0, b"\x04\x22\x4d\x18"), (0, b"\x02\x21\x4c\x18")],
    ),
    ("compressed by lzip", Decompress, &[(0, b"LZIP\x01")]),
    (
        "compressed by lzop",
        Decompress,
        &[(0, b"\x89LZO\0\r\n\x1a\n")],
    ),
    ("compressed by lzma", Decompress, &[(0, b"\x5d\0\0\x80\0")]),
    (
        "compressed by compress",
        Decompress,
        &[(0, b"\x1f\x9d"), (0, b"\x1f\xa0")],
    ),
    ("compressed by pack", Decompress, &[(0, b"\x1f\x1e")]),
    ("an HTML page", Replace, &[(0, b"<!DOCTYPE"), (0, b"<html")]),
];
/// Signatures in the last sector: fixed VHDs and Apple disk images.
const FOOTERS: [(&[u8], &str); 2] = [
    (b"conectix", "a vpc image"),
    (b"koly\0\0\0\x04", "a dmg image"),
];
/// Length of that sector.
const FOOTER_BYTES: u64 = 512;

/// Signature of qcow and qcow2.
const QCOW_MAGIC: &[u8] = b"QFI\xfb";
/// Length of a qcow2 header of version 2, and of what every version has.
const QCOW2_V2_BYTES: usize = 72;
/// Incompatible feature: QEMU found the image's tables damaged.
const QCOW2_CORRUPT: u64 = 1 << 1;
/// Incompatible feature: guest data lie in another file.
const QCOW2_EXTERNAL_DATA: u64 = 1 << 2;
/// Header extension that names that file.
const QCOW2_EXTENSION_DATA_FILE: u32 = 0x4441_5441;
/// Header extensions that are looked through for that name. Behind more of them the name stays unknown, and
/// the image is refused all the same.
const QCOW2_EXTENSIONS_MAX: usize = 64;
/// Longest file name that a qcow2 header may hold.
const QCOW2_NAME_BYTES_MAX: u32 = 1023;
/// Granularity of the size of a disk in qemu.
const SECTOR_BYTES: u64 = 512;

/// Format of an image, by its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detected {
    /// One that import takes.
    Known(ImageFormat),
    /// A compressed file.
    Compressed(Compression),
    /// An unsupported format.
    Other(&'static str, Remedy),
}

/// Detects the format of an image of `bytes` bytes. What has no signature is raw.
pub fn detect(file: &File, bytes: u64) -> io::Result<Detected> {
    let mut head = [0; HEAD_BYTES];
    let len = bytes.min(HEAD_BYTES as u64) as usize;
    file.read_exact_at(&mut head[..len], 0)?;
    if head.starts_with(QCOW_MAGIC) {
        return Ok(match be32(&head, 4) {
            0 | 1 => Detected::Other("a qcow image", Convert),
            _ => Detected::Known(ImageFormat::Qcow2),
        });
    }
    if let Some(compression) = Compression::of(&head) {
        return Ok(Detected::Compressed(compression));
    }
    let begins = |(at, signature): &(usize, &[u8])| {
        let there = head[..len].get(*at..);
        there.is_some_and(|bytes| bytes.starts_with(signature))
    };
    let mut formats = SIGNATURES.iter();
    if let Some((name, remedy, _)) = formats.find(|(.., signatures)| signatures.iter().any(begins))
    {
        return Ok(Detected::Other(name, *remedy));
    }
    for (signature, name) in FOOTERS {
        if bytes >= FOOTER_BYTES {
            let mut foot = [0; 8];
            let foot = &mut foot[..signature.len()];
            file.read_exact_at(foot, bytes - FOOTER_BYTES)?;
            if foot == signature {
                return Ok(Detected::Other(name, Convert));
            }
        }
    }
    Ok(Detected::Known(ImageFormat::Raw))
}

/// What import needs of a qcow2 header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Qcow2Header {
    /// Size that a guest sees.
    pub virtual_bytes: u64,
    /// Another file that holds a part of the data.
    pub other_file: Option<OtherFile>,
    /// The data are encrypted.
    pub is_encrypted: bool,
    /// The image is marked corrupt.
    pub is_corrupt: bool,
}

/// A file that an image names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OtherFile {
    /// What lies under clusters that the image lacks.
    Backing(String),
    /// All data; the name is empty if the image does not tell it.
    Data(String),
}

/// Reads a qcow2 header.
///
/// # Errors
/// `InvalidData` if there is none, `UnexpectedEof` if the file ends in it.
pub fn qcow2_header(file: &File) -> io::Result<Qcow2Header> {
    let mut head = [0; QCOW2_V2_BYTES];
    file.read_exact_at(&mut head, 0)?;
    let version = be32(&head, 4);
    if !head.starts_with(QCOW_MAGIC) || !(2..=3).contains(&version) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it has no qcow2 header of version 2 or 3",
        ));
    }
    let (mut incompatible, mut header_bytes) = (0, QCOW2_V2_BYTES as u32);
    if version == 3 {
        let mut more = [0; 32];
        file.read_exact_at(&mut more, QCOW2_V2_BYTES as u64)?;
        incompatible = be64(&more, 0);
        header_bytes = be32(&more, 28);
    }
    let (backing_at, backing_len) = (be64(&head, 8), be32(&head, 16));
    let other_file = if incompatible & QCOW2_EXTERNAL_DATA != 0 {
        Some(OtherFile::Data(data_file_name(file, header_bytes)))
    } else if backing_at != 0 && backing_len != 0 {
        Some(OtherFile::Backing(name_at(file, backing_at, backing_len)))
    } else {
        None
    };
    let virtual_bytes = be64(&head, 24);
    Ok(Qcow2Header {
        virtual_bytes: virtual_bytes - virtual_bytes % SECTOR_BYTES,
        other_file,
        is_encrypted: be32(&head, 32) != 0,
        is_corrupt: incompatible & QCOW2_CORRUPT != 0,
    })
}

/// A name in the image; empty where it cannot be read, for it is only told.
fn name_at(file: &File, at: u64, len: u32) -> String {
    let mut name = vec![0; len.min(QCOW2_NAME_BYTES_MAX) as usize];
    match file.read_exact_at(&mut name, at) {
        Ok(()) => String::from_utf8_lossy(&name).into_owned(),
        Err(_) => String::new(),
    }
}

fn data_file_name(file: &File, header_bytes: u32) -> String {
    let mut at = u64::from(header_bytes);
    for _ in 0..QCOW2_EXTENSIONS_MAX {
        let mut extension = [0; 8];
        if file.read_exact_at(&mut extension, at).is_err() {
            break;
        }
        let (kind, len) = (be32(&extension, 0), be32(&extension, 4));
        at += 8;
        match kind {
            0 => break,
            QCOW2_EXTENSION_DATA_FILE => return name_at(file, at, len),
            _ => at += u64::from(len).next_multiple_of(8),
        }
    }
    String::new()
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    fn detected(bytes: &[u8]) -> Detected {
        detect(&file(bytes), bytes.len() as u64).unwrap()
    }

    /// A qcow2 header of version 3, with a name at its end.
    fn header(incompatible: u64, backing: bool, extension: u32, name: &[u8]) -> Vec<u8> {
        let mut head = vec![0; 104];
        head[..4].copy_from_slice(QCOW_MAGIC);
        head[7] = 3;
        if backing {
            head[8..16].copy_from_slice(&112_u64.to_be_bytes());
            head[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        }
        head[24..32].copy_from_slice(&1_048_577_u64.to_be_bytes());
        head[72..80].copy_from_slice(&incompatible.to_be_bytes());
        head[100..104].copy_from_slice(&104_u32.to_be_bytes());
        head.extend_from_slice(&extension.to_be_bytes());
        head.extend_from_slice(&(name.len() as u32).to_be_bytes());
        head.extend_from_slice(name);
        head
    }

    #[test]
    fn formats_are_detected_by_their_signatures() {
        assert_eq!(detected(&[]), Detected::Known(ImageFormat::Raw));
        assert_eq!(detected(&[7; 5000]), Detected::Known(ImageFormat::Raw));
        let qcow2 = header(0, false, 0, b"");
        assert_eq!(detected(&qcow2), Detected::Known(ImageFormat::Qcow2));
        let unsupported = |bytes: &[u8]| match detected(bytes) {
            Detected::Other(name, remedy) => (name, remedy),
            other => panic!("{other:?}"),
        };
        assert_eq!(unsupported(b"QFI\xfb\0\0\0\x01"), ("a qcow image", Convert));
        assert_eq!(unsupported(b"KDMV"), ("a vmdk image", Convert));
        assert_eq!(
            unsupported(b"PK\x03\x04 and more"),
            ("a zip archive", Unpack)
        );
        let at = |offset: usize, signature: &[u8], behind: usize| {
            [&vec![0; offset], signature, &vec![0; behind]].concat()
        };
        assert_eq!(
            unsupported(&at(0x40, b"\x7f\x10\xda\xbe", 0)).0,
            "a vdi image"
        );
        assert_eq!(unsupported(&at(257, b"ustar", 900)).1, Unpack);
        for (signature, name) in FOOTERS {
            assert_eq!(
                unsupported(&at(1536, signature, 512 - signature.len())).0,
                name
            );
        }
        // Whole, and cut off inside: no panic, and nothing that a shorter one is taken for.
        for (name, _, signatures) in SIGNATURES {
            for &(offset, signature) in *signatures {
                assert_eq!(unsupported(&at(offset, signature, 0)).0, *name);
                let cut = at(offset, &signature[..signature.len() - 1], 0);
                assert_eq!(detected(&cut), Detected::Known(ImageFormat::Raw), "{name}");
            }
        }
    }

    #[test]
    fn compressions_are_detected_by_their_signatures() {
        for (head, compression) in [
            (&b"\x1f\x8b\x08\0"[..], Compression::Gzip),
            (b"\xfd7zXZ\0", Compression::Xz),
            (b"\x28\xb5\x2f\xfd", Compression::Zstd),
            // pzstd writes a skippable frame first.
            (b"\x50\x2a\x4d\x18", Compression::Zstd),
            (b"BZh91AY&SY", Compression::Bzip2),
            (b"BZh1\x17\x72\x45\x38\x50\x90", Compression::Bzip2),
        ] {
            assert_eq!(detected(head), Detected::Compressed(compression));
        }
        for head in [
            &b"BZh"[..],
            b"BZh0\x31\x41\x59\x26\x53\x59",
            b"\x1f\x8b\x07",
            b"BM",
        ] {
            assert_eq!(detected(head), Detected::Known(ImageFormat::Raw));
        }
    }

    #[test]
    fn a_qcow2_header_tells_of_other_files() {
        let told = |head: &[u8]| qcow2_header(&file(head)).unwrap();
        let alone = told(&header(0, false, 0, b""));
        assert_eq!(alone.virtual_bytes, 1_048_576);
        assert_eq!((alone.other_file, alone.is_encrypted), (None, false));
        assert!(!alone.is_corrupt && told(&header(QCOW2_CORRUPT, false, 0, b"")).is_corrupt);
        let backing = told(&header(0, true, 0, b"/etc/shadow"));
        let shadow = "/etc/shadow".to_owned();
        assert_eq!(backing.other_file, Some(OtherFile::Backing(shadow.clone())));
        let kind = QCOW2_EXTENSION_DATA_FILE;
        let data = told(&header(QCOW2_EXTERNAL_DATA, false, kind, b"/etc/shadow"));
        assert_eq!(data.other_file, Some(OtherFile::Data(shadow)));
        let unnamed = told(&header(QCOW2_EXTERNAL_DATA, false, 0, b""));
        assert_eq!(unnamed.other_file, Some(OtherFile::Data(String::new())));
    }

    #[test]
    fn a_damaged_qcow2_header_is_an_error() {
        let whole = header(u64::MAX, true, 0x1234_5678, &[0xff; 8]);
        for len in 0..whole.len() {
            // Whatever is told of it: no panic.
            let _ = qcow2_header(&file(&whole[..len]));
            let _ = detected(&whole[..len]);
        }
        assert!(qcow2_header(&file(&[0; 200])).is_err());
    }
}
