//! Asking before something is destroyed.

use std::io::{BufRead, IsTerminal, Write};

use api::failure::{Context, Failure, Kind, Result};

/// Asks on the terminal whether to do `what` ("delete volume x and its data"). Without a terminal it is an
/// error that names `--yes`.
pub fn confirm(what: &str, yes: bool) -> Result<()> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Err(Failure::invalid(
            format!("cannot {what} without confirmation, and there is no terminal to ask on"),
            "add --yes",
        ));
    }
    eprint!("penstock: {what}? [y/N] ");
    std::io::stderr().flush().context(|| "ask".into())?;
    let mut answer = String::new();
    std::io::stdin()
        .lock()
        .read_line(&mut answer)
        .context(|| "read the answer".into())?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::plain(Kind::Denied, "nothing was done")),
    }
}
