//! Signatures by minisign (<https://jedisct1.github.io/minisign/>): Ed25519 over a BLAKE2b hash of the file.

use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use minisign::{KeyPair, PublicKey, SecretKey, SecretKeyBox};

/// Signs files with one key.
pub struct Signer {
    public: PublicKey,
    secret: SecretKey,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signer({})", self.public.to_base64())
    }
}

impl Signer {
    /// The key in `file`, which has no password. If there is no such file, a new key is made there, readable
    /// by its owner alone, and `say` is told.
    ///
    /// # Errors
    /// The file is no key of minisign, or has a password, or cannot be read or written.
    pub fn open(file: &Path, say: &dyn Fn(&str)) -> Result<Self> {
        if !file.exists() {
            say(&format!("makes a key to sign with: {}", file.display()));
            make(file)?;
        }
        let text =
            std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
        let secret = SecretKeyBox::from_string(&text)
            .and_then(|key| key.into_unencrypted_secret_key())
            .with_context(|| {
                format!(
                    "{} is no key of minisign without a password; `minisign -G -W -s FILE` makes one",
                    file.display()
                )
            })?;
        let public =
            PublicKey::from_secret_key(&secret).context("take the public half of the key")?;
        Ok(Self { public, secret })
    }

    /// The public key, as minisign keeps it in a file.
    ///
    /// # Errors
    /// Never seen; the library may refuse.
    pub fn public_key_file(&self) -> Result<String> {
        Ok(self
            .public
            .to_box()
            .context("write the public key")?
            .to_string())
    }

    /// Signs `file` into a file beside it, whose name ends with `.minisig`. `comment` is signed with it.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn sign(&self, file: &Path, comment: &str) -> Result<PathBuf> {
        let source =
            std::fs::File::open(file).with_context(|| format!("open {}", file.display()))?;
        let signature = minisign::sign(
            Some(&self.public),
            &self.secret,
            source,
            Some(comment),
            Some("signature of the Penstock appliance"),
        )
        .with_context(|| format!("sign {}", file.display()))?;
        let mut name = file.as_os_str().to_owned();
        name.push(".minisig");
        let target = PathBuf::from(name);
        std::fs::write(&target, signature.to_string())
            .with_context(|| format!("write {}", target.display()))?;
        Ok(target)
    }
}

fn make(file: &Path) -> Result<()> {
    let KeyPair { sk, .. } = KeyPair::generate_unencrypted_keypair().context("make a key")?;
    let text = sk.to_box(None).context("write a key")?.to_string();
    if let Some(directory) = file.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let mut target = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
        .with_context(|| format!("create {}", file.display()))?;
    std::io::Write::write_all(&mut target, text.as_bytes())
        .with_context(|| format!("write {}", file.display()))
}

/// SHA-256 in hexadecimal digits.
pub(crate) fn sha256_hex(bytes: &[u8]) -> String {
    hex(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref())
}

/// Likewise, of a file.
pub(crate) fn sha256_of_file(path: &Path) -> Result<String> {
    let mut file = std::fs::File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file
            .read(&mut buffer)
            .with_context(|| format!("read {}", path.display()))?
        {
            0 => return Ok(hex(context.finish().as_ref())),
            read => context.update(&buffer[..read]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_signed_is_told_from_what_was_changed() {
        let dir = tempfile::tempdir().expect("a directory");
        let key = dir.path().join("key");
        let signer = Signer::open(&key, &|_| {}).expect("a new key");
        let again = Signer::open(&key, &|_| {}).expect("the same key");
        let public = signer.public_key_file().expect("public key");
        assert_eq!(public, again.public_key_file().expect("public key"));

        let file = dir.path().join("update");
        std::fs::write(&file, b"a slot").expect("write");
        let signature = signer.sign(&file, "version 2").expect("sign");
        let check = |data: &[u8]| {
            let text = std::fs::read_to_string(&signature).expect("read");
            let signature = minisign::SignatureBox::from_string(&text).expect("a signature");
            let key = minisign::PublicKeyBox::from_string(&public).expect("a key");
            let key = key.into_public_key().expect("a key");
            minisign::verify(
                &key,
                &signature,
                std::io::Cursor::new(data),
                true,
                false,
                false,
            )
        };
        assert!(check(b"a slot").is_ok());
        assert!(check(b"a slut").is_err());
    }

    #[test]
    fn what_is_no_key_is_refused_with_the_way_to_make_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let key = dir.path().join("key");
        std::fs::write(&key, "hello").expect("write");
        let refusal = Signer::open(&key, &|_| {}).expect_err("no key");
        assert!(
            format!("{refusal:#}").contains("minisign -G -W"),
            "{refusal:#}"
        );
    }
}
