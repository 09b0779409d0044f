//! `penstock volume`.

use std::path::PathBuf;
use std::str::FromStr;

use api::size::{NewSize, Size};
use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser;

use super::ImageFormat;

/// `penstock volume …`.
#[derive(Debug, Subcommand)]
pub enum VolumeCommand {
    /// Create an empty volume
    Create {
        /// Name of the new volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Size, like 10G
        size: Size,
        /// Pool to create it in
        #[arg(long, value_name = "POOL")]
        pool: Option<String>,
        /// Behaviour of writes without space: fail at once, or wait first [default: wait:60]
        #[arg(long, value_name = "error|wait[:SECONDS]")]
        on_full: Option<OnFull>,
    },
    /// Change how a volume behaves, also while guests use it
    Set {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Behaviour of writes without space: fail at once, or wait first
        #[arg(long, value_name = "error|wait[:SECONDS]")]
        on_full: OnFull,
    },
    /// List volumes
    List,
    /// Show one volume
    Show {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
    },
    /// Give a volume that nobody uses another name
    Rename {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Its new name
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        to: String,
    },
    /// Change a volume's size; guests see it at once
    Resize {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// New size, like 20G, or an increase, like +10G
        size: NewSize,
        /// Do not ask before shrinking, which discards the end of the volume
        #[arg(long)]
        yes: bool,
    },
    /// Delete a volume and its data
    Delete {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Fill a volume from a raw or qcow2 image, which may be compressed by gzip, xz, zstd or bzip2; creates
    /// the volume if it does not exist
    Import {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// Image file or block device
        file: PathBuf,
        /// Pool to create it in
        #[arg(long, value_name = "POOL")]
        pool: Option<String>,
        /// Format of the image [default: detected from its content, after decompression]
        #[arg(long)]
        format: Option<ImageFormat>,
        /// Import what can be read of a damaged qcow2 image, and zeroes for the rest
        #[arg(long)]
        force: bool,
        /// Do not ask before replacing the content of an existing volume
        #[arg(long)]
        yes: bool,
    },
    /// Copy a volume into a file
    Export {
        /// Name of the volume
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        name: String,
        /// File to write, `-` for standard output
        file: PathBuf,
        /// Format of the file
        #[arg(long, default_value = "raw")]
        format: ImageFormat,
        /// Overwrite FILE if it exists
        #[arg(long)]
        force: bool,
        /// Go on over blocks that no replica can give: they are zeroes in the copy, and LIST, a new file,
        /// says which they are
        #[arg(long, value_name = "LIST")]
        skip_bad: Option<PathBuf>,
        /// Copy while a guest is connected; the copy is not of one point in time
        #[arg(long)]
        live: bool,
    },
}

/// What a write does that finds no space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnFull {
    wait_s: u32,
}

impl OnFull {
    /// How long it waits before it fails, in seconds.
    pub fn wait_s(self) -> u32 {
        self.wait_s
    }
}

impl FromStr for OnFull {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wait_s = match text.split_once(':') {
            None if text == "error" => 0,
            None if text == "wait" => meta::OnFull::default().wait_s,
            Some(("wait", seconds)) => seconds
                .parse()
                .ok()
                .filter(|seconds| *seconds > 0)
                .ok_or_else(|| format!("'{seconds}' is no number of seconds from 1 on"))?,
            _ => return Err("give error, wait, or wait:SECONDS".to_owned()),
        };
        Ok(Self { wait_s })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_waits_as_long_as_is_said() {
        let parsed = |text: &str| text.parse().map(OnFull::wait_s);
        assert_eq!(parsed("error"), Ok(0));
        assert_eq!(parsed("wait"), Ok(60));
        assert_eq!(parsed("wait:300"), Ok(300));
        for wrong in [
            "", "wait:", "wait:0", "wait:-1", "wait:1m", "error:3", "Error",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
