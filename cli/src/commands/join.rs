//! Commands that make a cluster and let nodes into it.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use api::client::{Client, encode};
use api::failure::{Failure, Kind, Result, plain_io};
use api::moment::Moment;
use api::types::{OpenToken, Token, TokenCreate};
use config::datadir;
use config::identity::{
    self, Bootstrap, Identity, Record, Settings, refuse_node, refuse_one_of_several,
};
use config::{self, Config, RoleName, StoreKind};
use hyper::Method;
use meta::first::{self, Alone};
use meta::net::enrol::{EnrolmentError, EnrolmentRequest, Invitation, enrol};
use meta::pki::{ClusterCa, NodeKey, PkiError};
use meta::{Level, NodeId, Role, UnixMillis};
use sandbox::become_owner;
use serde::Serialize;
use uuid::Uuid;

use crate::args::{InitArgs, JoinArgs, PeerArgs, TokenCommand, merge};
use crate::table::Table;

use super::{print, print_json};

/// Where the Debian package puts its services.
const UNITS: &str = "/usr/lib/systemd/system";
/// Data directory of `penstock.service`; that of `penstock@NAME.service` has `-NAME` behind it.
const SERVICE_DATA: &str = "/var/lib/penstock";

/// No token is longer.
const TOKEN_BYTES_MAX: u64 = 64 << 10;

/// What was made.
#[derive(Serialize)]
struct Made<'a> {
    cluster: Uuid,
    node: u64,
    name: &'a str,
    data: &'a Path,
}

pub(super) fn pki_failure(e: PkiError) -> Failure {
    Failure::plain(Kind::Failed, e)
}

/// The configuration, with these options.
pub(super) fn read_config(
    file: Option<&Path>,
    peers: PeerArgs,
    data: Option<PathBuf>,
) -> Result<Config> {
    let file = config::read_named(file)?.map(|(_, file)| file);
    let file = file.unwrap_or_default();
    let mut file = merge::peers(file, peers);
    file.data = data.or(file.data);
    config::resolve(file)
}

/// `penstock init`.
pub fn init(args: InitArgs, data: Option<PathBuf>, json: bool) -> Result<()> {
    let config = read_config(args.config.as_deref(), args.peers, data)?;
    become_owner(&config.data)?;
    let settings = Settings::new(&config.peers)?;
    if !settings.roles.contains(&Role::Meta) {
        return Err(Failure::invalid(
            "the first node of a cluster keeps its metadata",
            "add meta to its roles",
        ));
    }
    let dir = datadir::DataDir::take(&config.data)?;
    refuse_one_of_several(&config.data)?;
    let alone = alone_in(&config.data, &settings)?;
    let (cluster, node, history) = match &alone {
        Some(alone) => (alone.cluster, alone.node, alone.history),
        None => (Uuid::new_v4(), NodeId(1), None),
    };
    let (ca, ca_certificate) = ClusterCa::generate(cluster).map_err(pki_failure)?;
    let key = NodeKey::generate().map_err(pki_failure)?;
    let certificate = ca.issue(node, &key.public_key()).map_err(pki_failure)?;
    let bootstrap = Bootstrap {
        replicas: args.replicas,
        min_in_sync: args.replicas / 2 + 1,
    };
    let mut record = Record::new(cluster, node, Some(bootstrap), settings);
    record.history = history;
    let identity = Identity {
        record,
        ca: ca_certificate,
        certificate,
        key: key.to_pem(),
        ca_key: Some(ca.key_pem().to_owned()),
    };
    identity.store(&config.data)?;
    if alone.is_some() {
        identity::note_begun(&config.data)?;
    }
    drop(dir);
    print_joined(&config, &identity.record, json)?;
    let (start, named) = how_to_start(&config.data);
    eprintln!(
        "penstock: start it with `{start}`; then `penstock token create --roles meta,storage,host{named}` \
         prints a token with which another node like this one joins, and `penstock token \
         create{named}` one for a host that keeps no data"
    );
    if alone.is_some() {
        eprintln!(
            "penstock: it keeps its volumes and filesystems, with one copy of each; before others join, run \
             `penstock pool set default --replicas {}` here: they then get the other copies",
            args.replicas
        );
    } else if args.replicas > 1 {
        eprintln!(
            "penstock: volumes can be made once {} nodes with devices are there",
            bootstrap.min_in_sync
        );
    }
    Ok(())
}

/// The node of its own that has the data directory, if there is one and it can be the first of several.
fn alone_in(data: &Path, settings: &Settings) -> Result<Option<Alone>> {
    let found = first::look(&datadir::meta(data, StoreKind::File));
    let found = found.map_err(|e| Failure::plain(Kind::Failed, e))?;
    let Some(alone) = found else {
        return Ok(None);
    };
    let shown = data.display();
    if !alone.devices.is_empty() && !settings.roles.contains(&Role::Storage) {
        return Err(Failure::invalid(
            format!("the node in {shown} has data, and is to serve none"),
            "add storage to its roles",
        ));
    }
    Ok(Some(alone))
}

/// `penstock join`.
pub fn join(args: JoinArgs, data: Option<PathBuf>, json: bool) -> Result<()> {
    // While the process may read what the owner of the data directory may not.
    let token = read_token(args.token, args.token_file.as_deref())?;
    let config = read_config(args.config.as_deref(), args.peers, data)?;
    // Before the runtime may have threads.
    become_owner(&config.data)?;
    super::runtime()?.block_on(join_as(&token, &config, json))
}

/// The token as it was given, or out of a file or standard input, without what stands around it.
fn read_token(given: Option<String>, file: Option<&Path>) -> Result<String> {
    let mut text = String::new();
    let read = match (given.as_deref(), file) {
        (Some("-"), _) => std::io::stdin()
            .take(TOKEN_BYTES_MAX)
            .read_to_string(&mut text),
        (Some(token), _) => return Ok(token.to_owned()),
        (None, Some(file)) => std::fs::File::open(file)
            .and_then(|file| file.take(TOKEN_BYTES_MAX).read_to_string(&mut text)),
        (None, None) => Ok(0),
    };
    let source = || file.map_or("standard input".into(), |file| file.display().to_string());
    read.map_err(|error| {
        Failure::invalid(
            format!(
                "cannot read the token from {}: {}",
                source(),
                plain_io(&error)
            ),
            "name a readable file that holds what `penstock token create` printed",
        )
    })?;
    match text.trim() {
        "" => Err(Failure::invalid(
            format!("there is no token in {}", source()),
            "give what `penstock token create` printed",
        )),
        token => Ok(token.to_owned()),
    }
}

async fn join_as(token: &str, config: &Config, json: bool) -> Result<()> {
    let invitation: Invitation = token.parse().map_err(|e| {
        let told = format!("{e}");
        let (error, hint) = told.split_once(": ").unwrap_or((&told, ""));
        Failure::invalid(error, hint)
    })?;
    let mut settings = Settings::new(&config.peers)?;
    // The token is good once: what can be found out to fail is found out before it is shown.
    config::check_admin_socket(&config.admin_socket)?;
    let dir = datadir::DataDir::take(&config.data)?;
    refuse_node(&config.data, &datadir::meta(&config.data, StoreKind::File))?;
    identity::rehearse(&config.data)?;
    settings.check_addresses()?;
    let key = NodeKey::generate().map_err(pki_failure)?;
    let question = EnrolmentRequest {
        name: settings.name.clone(),
        roles: settings.roles.clone(),
        // Without a word of the operator, what the token grants.
        takes_granted: config.peers.roles.is_none(),
        needs: match config.devices.is_empty() {
            true => BTreeSet::new(),
            false => BTreeSet::from([Role::Storage]),
        },
        labels: settings.labels.clone(),
        control_address: settings.control().to_string(),
        data_address: settings.data().to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        level: Level::KNOWN,
        public_key: key.public_key(),
    };
    let answer = enrol(&invitation, question).await.map_err(enrol_failure)?;
    settings.roles = answer.roles;
    let mut record = Record::new(invitation.cluster, answer.node, None, settings);
    record.history = answer.history;
    let identity = Identity {
        record,
        ca: answer.ca,
        certificate: answer.certificate,
        key: key.to_pem(),
        ca_key: answer.ca_key,
    };
    identity.store(&config.data).map_err(|failure| {
        Failure::new(
            failure.kind,
            failure.error,
            format!(
                "fix that, remove node {} from the cluster and join with a new token: this one is used up",
                identity.record.settings.name
            ),
        )
    })?;
    drop(dir);
    print_joined(config, &identity.record, json)?;
    eprintln!(
        "penstock: it has the roles {}; start it with `{}`",
        Role::list(&identity.record.settings.roles),
        how_to_start(&config.data).0
    );
    Ok(())
}

/// The command that starts the daemon of a data directory, and the option by which other commands then find
/// it. Where the Debian package is installed, its services own the directories named after them.
fn how_to_start(data: &Path) -> (String, String) {
    let installed = |unit: &str| Path::new(UNITS).join(unit).exists();
    let shown = data.display().to_string();
    match shown.strip_prefix(SERVICE_DATA) {
        Some("") if installed("penstock.service") => {
            ("systemctl enable --now penstock".to_owned(), String::new())
        }
        Some(rest) if rest.starts_with('-') && installed("penstock@.service") => (
            format!("systemctl enable --now penstock@{}", &rest[1..]),
            format!(" --data {shown}"),
        ),
        _ => (
            format!("penstock serve --data {shown}"),
            format!(" --data {shown}"),
        ),
    }
}

fn enrol_failure(e: EnrolmentError) -> Failure {
    let hint = match &e {
        EnrolmentError::Unreachable { .. } => {
            "see that the daemon runs there and that no firewall is between, then join again with the same \
             token"
        }
        EnrolmentError::Clock { .. } => {
            "compare `date -u` here and there, correct the clock that is wrong, then join again with the \
             same token"
        }
        EnrolmentError::Stranger { .. } => {
            "make a new token on a node of the cluster that this one is to join"
        }
        // It contains a hint itself.
        EnrolmentError::Refused { .. } => return Failure::plain(Kind::Denied, e),
        EnrolmentError::Lost { .. } => {
            "try again; if the token is refused, make a new one and remove the node that `penstock node \
             list` shows for this try"
        }
    };
    Failure::new(Kind::Unreachable, e, hint)
}

fn print_joined(config: &Config, record: &Record, json: bool) -> Result<()> {
    let made = Made {
        cluster: record.cluster,
        node: record.node.0,
        name: &record.settings.name,
        data: &config.data,
    };
    if json {
        return print_json(&made);
    }
    print(|out| {
        writeln!(out, "cluster  {}", made.cluster)?;
        writeln!(out, "node     {} ({})", made.node, made.name)?;
        writeln!(out, "data     {}", made.data.display())
    })
}

/// `penstock token …`.
pub async fn token(verb: TokenCommand, client: &Client, json: bool) -> Result<()> {
    let (lifetime, roles) = match verb {
        TokenCommand::Create { lifetime, roles } => (lifetime, roles),
        TokenCommand::List => return list_tokens(client, json).await,
        TokenCommand::Revoke { id } => return revoke_token(&id, client, json).await,
    };
    let words = |roles: Vec<RoleName>| roles.into_iter().map(|role| Role::from(role).to_string());
    let request = TokenCreate {
        lifetime_s: lifetime.as_secs(),
        roles: roles.map(|roles| words(roles).collect()),
    };
    let token: Token = client.call(Method::POST, "/v1/tokens", &request).await?;
    if json {
        return print_json(&token);
    }
    print(|out| writeln!(out, "{}", token.token))?;
    eprintln!(
        "penstock: it lets one node join, once, with the roles {}; `penstock token revoke {}` takes it back",
        token.roles.join(","),
        token.id
    );
    eprintln!("penstock: {}", how_to_join(&token.roles));
    Ok(())
}

/// Next steps for a token that grants these roles.
fn how_to_join(roles: &[String]) -> String {
    let grants = |role: Role| roles.contains(&role.to_string());
    let join = "on that machine: `penstock join TOKEN --listen ADDRESS`, then `penstock serve`";
    match (grants(Role::Meta), grants(Role::Storage)) {
        (true, _) => format!(
            "{join}; with the role meta it gets the key that lets nodes in, so give this token to no machine \
             that you do not trust with the cluster"
        ),
        (false, true) => join.to_owned(),
        (false, false) => format!(
            "{join}; it keeps no data: for a node that stores data, make a token with `penstock token create \
             --roles meta,storage,host`"
        ),
    }
}

async fn list_tokens(client: &Client, json: bool) -> Result<()> {
    let tokens: Vec<OpenToken> = client.get("/v1/tokens").await?;
    if json {
        return print_json(&tokens);
    }
    let mut table = Table::new(["ID", "ROLES", "MADE", "ENDS"]);
    for token in tokens {
        table.row([
            token.id,
            token.roles.join(","),
            Moment::from(UnixMillis(token.created_at_ms)).to_string(),
            Moment::from(UnixMillis(token.expires_at_ms)).to_string(),
        ]);
    }
    print(|mut out| table.print(&mut out))
}

async fn revoke_token(id: &str, client: &Client, json: bool) -> Result<()> {
    let path = format!("/v1/tokens/{}", encode(id));
    let token: OpenToken = client.call(Method::DELETE, &path, &()).await?;
    if json {
        return print_json(&token);
    }
    eprintln!("penstock: join token {} is revoked", token.id);
    Ok(())
}
