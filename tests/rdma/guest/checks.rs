//! What `penstock rdma check` tells.

use anyhow::Result;
use fabric_rdma::check;

/// Checks this machine, for this data address or for any.
pub fn check(address: Option<&str>) -> Result<()> {
    let address = address.map(str::parse).transpose()?;
    let checked = check::run(address);
    for finding in &checked.findings {
        let check::Finding {
            about,
            verdict,
            text,
            hint,
        } = finding;
        println!("{verdict:?} {about}: {text} [{hint}]");
    }
    println!("usable: {}", checked.usable);
    Ok(())
}
