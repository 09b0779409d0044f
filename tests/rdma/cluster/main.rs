//! Runs inside virtual machines: nodes of a cluster on a machine's RDMA device, and at a disk a guest without
//! a machine of its own. What it prints and promises is looked at in `tests/cluster.rs`.

use anyhow::{Result, bail};
use guest_rig::Form;

mod alone;
mod apart;
mod kit;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["alone", "short"] => alone::run(Form::Short),
        ["alone", "long"] => alone::run(Form::Long),
        ["storage"] => apart::storage(),
        ["host", token] => apart::host(token),
        _ => bail!("there is no part {words:?}"),
    }
}
