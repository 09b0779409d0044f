//! `penstock events`.

use std::time::Duration;

use api::client::Client;
use api::failure::{Failure, Kind, Result};
use api::types::{Event, EventAuthor};

use crate::args::EventsArgs;
use crate::table::Table;

use super::print_to_reader;

/// `--follow` asks again after this long.
const FOLLOW_PAUSE: Duration = Duration::from_secs(1);
/// `--follow` takes so many at a time.
const FOLLOW_BATCH: usize = 1000;

/// Runs the verb.
pub async fn run(args: EventsArgs, client: &Client, json: bool) -> Result<()> {
    let mut events = ask(client, &args, args.after, args.limit).await?;
    let mut last = args.after.unwrap_or(0);
    let mut is_read = tell(&events, json, true)?;
    while args.follow && is_read {
        last = events.last().map_or(last, |event| event.number);
        if events.is_empty() {
            tokio::time::sleep(FOLLOW_PAUSE).await;
        }
        events = ask(client, &args, Some(last), Some(FOLLOW_BATCH)).await?;
        if events.iter().any(|event| event.number <= last) {
            let told = "the daemon repeats events that it told before";
            return Err(Failure::plain(Kind::Failed, told));
        }
        is_read = tell(&events, json, false)?;
    }
    Ok(())
}

async fn ask(
    client: &Client,
    args: &EventsArgs,
    after: Option<u64>,
    limit: Option<usize>,
) -> Result<Vec<Event>> {
    let after = after.map(|after| format!("after={after}"));
    let since = args
        .since
        .map(|since| format!("since_ms={}", since.to_millis().0));
    let limit = limit.map(|limit| format!("limit={limit}"));
    let query: Vec<String> = [after, since, limit].into_iter().flatten().collect();
    let query = query.join("&");
    client.get(&format!("/v1/events?{query}")).await
}

/// One line each: aligned for people, JSON lines for scripts. False if nobody reads them any more.
fn tell(events: &[Event], json: bool, heading: bool) -> Result<bool> {
    if json {
        return print_to_reader(|out| {
            events.iter().try_for_each(|event| {
                serde_json::to_writer(&mut *out, event)?;
                writeln!(out)
            })
        });
    }
    let mut table = Table::new([">NUMBER", "TIME", "SUBJECT", "BY", "WHAT"]);
    for event in events {
        table.row([
            event.number.to_string(),
            event.at.to_string(),
            event.subject.clone(),
            event.by.as_ref().map_or_else(|| "-".to_owned(), author),
            event.text.clone(),
        ]);
    }
    match heading {
        true => print_to_reader(|mut out| table.print(&mut out)),
        false => print_to_reader(|mut out| table.print_rows(&mut out)),
    }
}

/// Like `root@one`, or `one` for what that node did by itself.
fn author(by: &EventAuthor) -> String {
    match by.uid {
        None => by.node_name.clone(),
        Some(0) => format!("root@{}", by.node_name),
        Some(uid) => format!("{uid}@{}", by.node_name),
    }
}
