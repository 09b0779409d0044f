//! Options of `penstock attachment stats`.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

/// Longest interval, in seconds.
const INTERVAL_MAX_S: u32 = 86_400;

/// `penstock attachment stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Socket of the attachment, or name of its volume or filesystem
    #[arg(value_name = "SOCKET|NAME", value_parser = NonEmptyStringValueParser::new())]
    pub target: String,
    /// Print a line for each interval of so many seconds [default: 1] until interrupted: rates, and of
    /// volumes percentiles of latency in that interval
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "1",
        value_parser = seconds
    )]
    pub watch: Option<u32>,
}

fn seconds(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(seconds) if (1..=INTERVAL_MAX_S).contains(&seconds) => Ok(seconds),
        _ => Err(format!(
            "write 1 to {INTERVAL_MAX_S} seconds; the attachment stands before --watch"
        )),
    }
}
