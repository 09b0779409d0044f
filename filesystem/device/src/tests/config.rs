//! What the device offers.

use vhost_backend::device::Device;
use vhost_backend::ring;
use vhost_backend::session::message::protocol;

use crate::memory_fs::MemoryFilesystem;
use crate::testing::options;
use crate::{CONFIG_BYTES, FsDevice, FsError, FsOptions};

fn refused(tag: &str, request_queues: u16) -> FsError {
    let options = FsOptions {
        tag: tag.to_owned(),
        request_queues,
        read_only: false,
    };
    FsDevice::new(MemoryFilesystem::new(), options).unwrap_err()
}

#[test]
fn the_configuration_space_has_tag_and_request_queues() {
    for tag in ["tree", "a name with spaces, and to the full: 36."] {
        let tag = &tag[..tag.len().min(36)];
        let options = FsOptions {
            tag: tag.to_owned(),
            ..options(5, false)
        };
        let device = FsDevice::new(MemoryFilesystem::new(), options).unwrap();
        let mut config = [0xff; CONFIG_BYTES + 3];
        device.read_config(0, &mut config);
        assert_eq!(&config[..tag.len()], tag.as_bytes());
        assert!(config[tag.len()..36].iter().all(|byte| *byte == 0));
        assert_eq!(config[36..], [5, 0, 0, 0, 0, 0, 0]);
        device.read_config(36, &mut config[..4]);
        assert_eq!(config[..4], [5, 0, 0, 0]);
        device.read_config(u32::MAX, &mut config);
        assert_eq!(config, [0; CONFIG_BYTES + 3]);
        assert_eq!(device.queues(), 6);
        let error = device.write_config(36, &[1]).unwrap_err();
        assert_eq!(error, FsError::ConfigWrite { offset: 36, len: 1 });
    }
}

#[test]
fn impossible_options_are_refused_by_name() {
    assert_eq!(refused("", 1), FsError::TagEmpty);
    let long = "t".repeat(37);
    let error = refused(&long, 1).to_string();
    assert!(error.contains(&long) && error.contains("37 bytes") && error.contains("at most 36"));
    for tag in ["a\nb", "a\0b", "\n"] {
        let tag = tag.to_owned();
        assert_eq!(refused(&tag, 1), FsError::TagCharacter { tag });
    }
    for queues in [0, 65, u16::MAX] {
        assert_eq!(refused("tree", queues), FsError::Queues(queues));
        assert!(refused("tree", queues).to_string().contains("give 1 to 64"));
    }
    // Bytes count, not characters.
    assert!(matches!(
        refused(&"ä".repeat(19), 1),
        FsError::TagTooLong { .. }
    ));
}

#[test]
fn neither_notifications_nor_the_configuration_are_offered() {
    let device = FsDevice::new(MemoryFilesystem::new(), options(64, false)).unwrap();
    assert_eq!(device.queues(), 65);
    assert_eq!(device.features(), ring::FEATURES);
    let offered = device.protocol_features();
    assert_eq!(offered & (protocol::CONFIG | protocol::INFLIGHT_SHMFD), 0);
    let wanted = protocol::MQ | protocol::REPLY_ACK | protocol::RESET_DEVICE;
    assert_eq!(offered & wanted, wanted);
    assert_eq!(offered & !protocol::OFFERED, 0);
}
