//! What each command does.

mod appliance;
mod attach;
mod attachments;
mod config;
pub mod confirm;
mod device;
mod events;
mod fs;
mod health;
mod join;
mod libvirt;
mod listing;
mod locate;
mod nfs;
mod node;
mod pool;
#[cfg_attr(not(feature = "rdma"), path = "commands/no_rdma.rs")]
mod rdma;
mod recovery;
mod stats;
mod support;
mod volume;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use ::config::reference;
use api::failure::{Context, Failure, Kind, Result};
use clap::CommandFactory;
use serde::Serialize;

use crate::DaemonVerb;
use crate::args::{
    AttachmentCommand, AttachmentsCommand, Cli, Command, ConfigCommand, Global, SupportCommand,
};

/// Runs a parsed command line.
pub fn run(cli: Cli, daemon: fn(DaemonVerb) -> Result<()>) -> Result<ExitCode> {
    let global = cli.global;
    match cli.command {
        Command::Serve(args) => daemon(DaemonVerb::Serve {
            args,
            data: global.data_dir(),
            is_by_variable: global.data.is_none(),
        })?,
        Command::Init(args) => join::init(args, global.data_dir(), global.json)?,
        Command::Join(args) => join::join(args, global.data_dir(), global.json)?,
        Command::VhostUserBlk(args) => daemon(DaemonVerb::BackendProgram {
            args,
            data: global.data_dir(),
        })?,
        Command::BlockDeviceHelper { dir } => daemon(DaemonVerb::BlockDeviceHelper { dir })?,
        Command::NfsHelper(args) => daemon(DaemonVerb::NfsHelper(args))?,
        Command::Meta(verb) => recovery::meta(verb, &global)?,
        Command::Cluster(verb) => recovery::cluster(verb, &global)?,
        Command::Rdma(verb) => return rdma::run(verb, global.json),
        Command::Appliance(verb) => appliance::run(&verb, global.json)?,
        Command::Update(verb) => appliance::update(&verb, global.json)?,
        Command::Support(SupportCommand::Bundle(args)) => {
            refuse_json(global.json, "the path of an archive")?;
            runtime()?.block_on(support::bundle(&args, &global))?;
        }
        Command::Libvirt(verb) => return runtime()?.block_on(libvirt::run(verb, &global)),
        Command::Config(ConfigCommand::Check { file }) => {
            return config::check(file.as_deref(), global.json);
        }
        Command::Completions { shell } => {
            refuse_json(global.json, "a completion script")?;
            completions(shell)?;
        }
        Command::Man { dir } => {
            refuse_json(global.json, "a man page")?;
            man(dir.as_deref())?;
        }
        command => return runtime()?.block_on(talk(command, &global)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that talks to a daemon.
async fn talk(command: Command, global: &Global) -> Result<ExitCode> {
    let client = locate::client(global).await?;
    let json = global.json;
    match command {
        Command::Token(verb) => join::token(verb, &client, json).await?,
        Command::Status => listing::status(&client, json).await?,
        Command::Health { verbose } => return health::run(&client, json, verbose).await,
        Command::Events(args) => events::run(args, &client, json).await?,
        Command::Volume(verb) => volume::run(verb, &client, json).await?,
        Command::Fs(verb) => fs::run(verb, &client, json).await?,
        Command::Attachment(verb) => match verb {
            AttachmentCommand::Create(verb) => attach::attach(verb, &client, json).await?,
            AttachmentCommand::List(args) => attachments::list(&args, &client, json).await?,
            AttachmentCommand::Move { target, to, socket } => {
                attach::move_to(&target, to, socket.as_deref(), &client, json).await?;
            }
            AttachmentCommand::Offer {
                target,
                to,
                expires,
            } => attach::offer(&target, to, expires, &client, json).await?,
            AttachmentCommand::Withdraw { target } => {
                attach::withdraw(&target, &client, json).await?;
            }
            AttachmentCommand::Stats(args) => stats::run(&args, &client, json).await?,
            AttachmentCommand::Delete(args) => attach::detach(&args, &client, json).await?,
        },
        Command::Attach(verb) => attach::attach(verb, &client, json).await?,
        Command::Attachments(AttachmentsCommand::List(args)) => {
            attachments::list(&args, &client, json).await?;
        }
        Command::Detach(args) => attach::detach(&args, &client, json).await?,
        Command::Node(verb) => node::run(verb, &client, json).await?,
        Command::Device(verb) => device::run(verb, &client, json).await?,
        Command::Pool(verb) => pool::run(verb, &client, json).await?,
        Command::Nfs(verb) => nfs::run(verb, &client, json).await?,
        Command::Config(ConfigCommand::Show) => config::show(&client, json).await?,
        Command::Serve(_)
        | Command::Init(_)
        | Command::Join(_)
        | Command::VhostUserBlk(_)
        | Command::BlockDeviceHelper { .. }
        | Command::NfsHelper(_)
        | Command::Meta(_)
        | Command::Cluster(_)
        | Command::Rdma(_)
        | Command::Libvirt(_)
        | Command::Appliance(_)
        | Command::Support(_)
        | Command::Update(_)
        | Command::Config(_)
        | Command::Completions { .. }
        | Command::Man { .. } => {
            unreachable!("run() handles what needs no daemon")
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context(|| "start the command's runtime".into())
}

/// Writes to standard output; a reader that went away (`| head`) is no failure.
fn print(write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
    print_to_reader(write).map(drop)
}

/// Same; false if the reader went away.
fn print_to_reader(write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<bool> {
    let mut out = std::io::stdout().lock();
    match write(&mut out).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(e).context(|| "write to standard output".into()),
    }
}

fn print_json<T: Serialize>(value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::plain(Kind::Failed, e))?;
    print(|out| writeln!(out, "{text}"))
}

/// The path as the daemon is told it: a relative one means what it means in this directory, not in the
/// daemon's. `what` it is of.
fn absolute(what: &str, path: &Path) -> Result<String> {
    let path = std::path::absolute(path).map_err(|e| Failure::plain(Kind::Invalid, e))?;
    path.into_os_string().into_string().map_err(|path| {
        Failure::invalid(
            format!("{what} path {} is not UTF-8", path.to_string_lossy()),
            "use another path",
        )
    })
}

/// What somebody typed who may mean a path or a name: as an absolute path if it has a slash, or is no name
/// and then a known path.
fn path_or_name<'a>(
    what: &str,
    typed: &str,
    is_name: bool,
    mut known: impl Iterator<Item = &'a str>,
) -> Result<String> {
    if typed.contains('/') {
        return absolute(what, Path::new(typed));
    }
    // Without a directory to be in there are no relative paths.
    let path = absolute(what, Path::new(typed)).ok();
    let meant = path.filter(|path| !is_name && known.any(|one| one == path));
    Ok(meant.unwrap_or_else(|| typed.to_owned()))
}

/// What is not JSON cannot be printed as such.
fn refuse_json(json: bool, what: &str) -> Result<()> {
    match json {
        false => Ok(()),
        true => Err(Failure::invalid(
            format!("{what} is printed, which is not JSON"),
            "leave --json out",
        )),
    }
}

/// A value for people where there is one.
fn or_dash(text: impl ToString) -> String {
    match text.to_string() {
        text if text.is_empty() => "-".to_owned(),
        text => text,
    }
}

fn completions(shell: clap_complete::Shell) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "penstock", &mut script);
    print(|out| out.write_all(&script))
}

fn man(dir: Option<&Path>) -> Result<()> {
    let command = Cli::command();
    match dir {
        Some(dir) => clap_mangen::generate_to(command, dir)
            .and_then(|()| std::fs::write(dir.join("penstock.toml.5"), reference::manual_page()))
            .context(|| format!("write man pages to {}", dir.display())),
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(command)
                .render(&mut page)
                .context(|| "render the man page".into())?;
            print(|out| out.write_all(&page))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_is_known_with_and_without_a_slash() {
        let here = absolute("socket", Path::new("disk.sock")).unwrap();
        assert!(Path::new(&here).is_absolute());
        let meant = |typed: &str, is_name| {
            path_or_name("socket", typed, is_name, [here.as_str()].into_iter()).unwrap()
        };
        assert_eq!(meant("disk.sock", false), here);
        assert_eq!(meant("./disk.sock", true), here);
        assert_eq!(meant(&here, false), here);
        assert_eq!(meant("disk", false), "disk", "of nothing");
        assert_eq!(meant("disk.sock", true), "disk.sock", "a name goes first");
    }
}
