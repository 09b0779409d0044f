//! Runs inside virtual machines: nodes of a cluster on a machine's RDMA device, and at a disk a guest without a machine of its own. What it
//! prints and promises is looked at in `tests/cluster.rs`.

use anyhow::{Result, bail};

mod alone;
mod apart;
mod kit;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => alone::run(),
        ["storage"] => apart::storage(),
        ["host", token] => apart::host(token),
        _ => bail!("there is no part {words:?}"),
    }
}
