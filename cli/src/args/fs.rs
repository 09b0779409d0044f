//! Verbs on filesystems, and their attachments.

use std::path::PathBuf;

use api::types::request_queues_default;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use fs_device::{REQUEST_QUEUES_MAX, TAG_BYTES_MAX};

/// `penstock fs …`.
#[derive(Debug, Subcommand)]
pub enum FsCommand {
    /// Create an empty filesystem
    Create {
        /// Name of the new filesystem
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Pool to keep its files in
        #[arg(long, value_name = "POOL", value_parser = NonEmptyStringValueParser::new())]
        pool: Option<String>,
    },
    /// List filesystems
    List,
    /// Show one filesystem: how much is in it, and who uses it
    Show {
        /// Name of the filesystem
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
    },
    /// Delete a filesystem and all files in it. It must not be attached
    Delete {
        /// Name of the filesystem
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// `penstock attach fs` and `penstock attachment create fs`.
#[derive(Debug, Args)]
pub struct AttachFsArgs {
    /// Name of the filesystem
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub name: String,
    /// vhost-user socket to listen on. Each guest needs one of its own
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// What the guest mounts it by
    #[arg(long, value_name = "TAG", value_parser = tag)]
    pub tag: String,
    /// Request queues to offer; guests before Linux 6.11 use one
    #[arg(
        long,
        value_name = "N",
        default_value_t = request_queues_default(),
        value_parser = clap::value_parser!(u16).range(1..=i64::from(REQUEST_QUEUES_MAX))
    )]
    pub queues: u16,
    /// Let the guest only read
    #[arg(long)]
    pub read_only: bool,
}

/// A tag that virtio-fs can carry and that guests can show.
fn tag(text: &str) -> Result<String, String> {
    match text.len() {
        0 => return Err(format!("it is empty; give 1 to {TAG_BYTES_MAX} bytes")),
        1..=TAG_BYTES_MAX => {}
        len => return Err(format!("it has {len} bytes; give at most {TAG_BYTES_MAX}")),
    }
    match text.contains('\n') {
        true => Err("it has a newline; leave that out".to_owned()),
        false => Ok(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{AttachCommand, AttachmentCommand, Cli, Command};

    fn parse(words: &[&str]) -> Result<AttachFsArgs, String> {
        let cli = Cli::try_parse_from([&["penstock"], words].concat());
        match cli.map_err(|e| e.to_string())?.command {
            Command::Attach(AttachCommand::Fs(args))
            | Command::Attachment(AttachmentCommand::Create(AttachCommand::Fs(args))) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_filesystem_is_attached_by_the_noun_and_its_short_form() {
        let rest = ["fs", "home", "--socket", "/s", "--tag", "t"];
        for verb in [&["attach"][..], &["attachment", "create"]] {
            let args = parse(&[verb, &rest].concat()).unwrap();
            assert_eq!((args.name.as_str(), args.tag.as_str()), ("home", "t"));
            assert_eq!((args.queues, args.read_only), (1, false));
        }
    }

    #[test]
    fn the_limits_of_tags_and_request_queues_are_told() {
        let of = |option: &str, value: &str| {
            let tag: &[&str] = if option == "--tag" {
                &[]
            } else {
                &["--tag", "t"]
            };
            let words = ["attach", "fs", "home", "--socket", "/s", option, value];
            parse(&[&words, tag].concat())
        };
        let longest = "ä".repeat(18);
        assert_eq!(of("--tag", &longest).unwrap().tag, longest);
        assert_eq!(of("--queues", "64").unwrap().queues, 64);
        for (option, value, told) in [
            ("--tag", "", "give 1 to 36 bytes"),
            ("--tag", &"a".repeat(37), "it has 37 bytes; give at most 36"),
            ("--tag", "a\nb", "it has a newline"),
            ("--queues", "0", "1..=64"),
            ("--queues", "65", "1..=64"),
        ] {
            let error = of(option, value).unwrap_err();
            assert!(error.contains(told) && error.contains(option), "{error}");
        }
        let error = parse(&["attach", "fs", "", "--socket", "/s", "--tag", "t"]).unwrap_err();
        assert!(error.contains("<NAME>"), "{error}");
    }
}
