//! `image`: the appliance.

use std::path::PathBuf;

use anyhow::Result;
use appliance_image::{Build, Kinds, Signer};
use clap::Args;
use guest_rig::paths::cache_root;

use crate::build::{target_directory, workspace};
use crate::package;

/// What to build.
#[derive(Debug, Args)]
pub struct Options {
    /// Directory for what is built [default: `image` in the build directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Version of the appliance [default: Penstock's]
    #[arg(long = "image-version", value_name = "VERSION", default_value = env!("CARGO_PKG_VERSION"))]
    version: String,
    /// Key to sign with, by minisign, without a password; made if there is none [default:
    /// `appliance-signing.key` in the cache]
    #[arg(long, value_name = "FILE")]
    signing_key: Option<PathBuf>,
    /// Ask Debian for newer packages
    #[arg(long)]
    refresh: bool,
    /// Only the qcow2 image and the update, little compressed
    #[arg(long)]
    fast: bool,
    #[command(flatten)]
    package: package::Options,
}

/// Builds the appliance and prints the paths of what was built.
pub fn image(options: &Options) -> Result<()> {
    let say = |line: &str| eprintln!("xtask: {line}");
    let cache = cache_root()?.join("appliance");
    let key = options.signing_key.clone();
    let signer = Signer::open(
        &key.unwrap_or_else(|| cache.join("appliance-signing.key")),
        &say,
    )?;
    let package = package::assemble(options.package.profile)?;
    let build = Build {
        cache: &cache,
        source: workspace(),
        package: &package,
        version: &options.version,
        epoch: package::epoch()?,
        signer: &signer,
        refresh: options.refresh,
    };
    let out = match &options.out {
        Some(out) => out.clone(),
        None => target_directory()?.join("image"),
    };
    let kinds = if options.fast {
        Kinds::Bootable
    } else {
        Kinds::All
    };
    let built = build.run(&out, kinds, &say)?;
    for path in &built {
        let bytes = std::fs::metadata(path)?.len();
        eprintln!("xtask: {:.1} MB  {}", bytes as f64 / 1e6, path.display());
        println!("{}", path.display());
    }
    Ok(())
}
