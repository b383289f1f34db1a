//! Mount options.

use std::io;

use rustix::mount::MountFlags;
use uvfs_server::mount::{FLAGS, MountOptions};

use crate::{Config, MountOption, SessionACL};

const CONTRARY: [(MountOption, MountOption); 6] = [
    (MountOption::Dev, MountOption::NoDev),
    (MountOption::Suid, MountOption::NoSuid),
    (MountOption::RO, MountOption::RW),
    (MountOption::Exec, MountOption::NoExec),
    (MountOption::Atime, MountOption::NoAtime),
    (MountOption::Sync, MountOption::Async),
];

pub(crate) fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// The word of `MountOption::CUSTOM` for programs to which signals are to do what they do without a mount.
const LEAVE_SIGNALS: &str = "leave_signals";

/// Whether signals are not to end the mount.
pub(crate) fn leaves_signals(config: &Config) -> bool {
    has_word(config, LEAVE_SIGNALS)
}

/// The word for a mount that outlives its process.
const SURVIVE: &str = "survive";

/// Whether the mount is to outlive its process.
pub(crate) fn survives(config: &Config) -> bool {
    has_word(config, SURVIVE)
}

fn has_word(config: &Config, wanted: &str) -> bool {
    config.mount_options.iter().any(|option| {
        matches!(option, MountOption::CUSTOM(words) if words.split(',').any(|word| word == wanted))
    })
}

/// The options that a configuration stands for.
pub(crate) fn for_mount(config: &Config) -> io::Result<MountOptions> {
    let given = &config.mount_options;
    for (one, other) in &CONTRARY {
        if given.contains(one) && given.contains(other) {
            let text = format!("{one:?} and {other:?} can't both be: leave one out");
            return Err(invalid(text));
        }
    }
    if given.contains(&MountOption::AutoUnmount) && config.acl == SessionACL::Owner {
        let text = "AutoUnmount needs an acl of All or RootAndOwner";
        return Err(invalid(text.into()));
    }
    if given.contains(&MountOption::AutoUnmount) && survives(config) {
        let text = "AutoUnmount: a mount with survive is to stay when its process is killed";
        return Err(invalid(text.into()));
    }
    let mut options = MountOptions {
        name: String::new(),
        subtype: String::new(),
        // The session refuses the others for RootAndOwner.
        allow_other: config.acl != SessionACL::Owner,
        default_permissions: false,
        flags: MountFlags::NODEV | MountFlags::NOSUID,
        max_read: 1 << 20,
        auto_unmount: given.contains(&MountOption::AutoUnmount),
    };
    for option in given {
        apply(&mut options, option)?;
    }
    if options.name.is_empty() {
        options.name = match options.subtype.as_str() {
            "" => "/dev/fuse".into(),
            subtype => subtype.into(),
        };
    }
    Ok(options)
}

fn apply(options: &mut MountOptions, option: &MountOption) -> io::Result<()> {
    let flags = &mut options.flags;
    match option {
        MountOption::FSName(name) => options.name.clone_from(name),
        MountOption::Subtype(subtype) => options.subtype.clone_from(subtype),
        MountOption::CUSTOM(words) => {
            for word in words.split(',').filter(|word| !word.is_empty()) {
                custom(options, word)?;
            }
        }
        MountOption::DefaultPermissions => options.default_permissions = true,
        MountOption::Dev => flags.remove(MountFlags::NODEV),
        MountOption::Suid => flags.remove(MountFlags::NOSUID),
        MountOption::RO => flags.insert(MountFlags::RDONLY),
        MountOption::NoExec => flags.insert(MountFlags::NOEXEC),
        MountOption::NoAtime => flags.insert(MountFlags::NOATIME),
        MountOption::DirSync => flags.insert(MountFlags::DIRSYNC),
        MountOption::Sync => flags.insert(MountFlags::SYNCHRONOUS),
        MountOption::AutoUnmount
        | MountOption::NoDev
        | MountOption::NoSuid
        | MountOption::RW
        | MountOption::Exec
        | MountOption::Atime
        | MountOption::Async => {}
    }
    Ok(())
}

fn custom(options: &mut MountOptions, word: &str) -> io::Result<()> {
    match word {
        "allow_other" => options.allow_other = true,
        "default_permissions" => options.default_permissions = true,
        LEAVE_SIGNALS | SURVIVE => {}
        _ => match FLAGS.iter().find(|(_, name)| *name == word) {
            Some((flag, _)) => options.flags.insert(*flag),
            None => {
                let bytes = word.strip_prefix("max_read=");
                let bytes = bytes.and_then(|bytes| bytes.parse().ok());
                let text = || format!("the mount option {word:?} is not known here: leave it out");
                options.max_read = bytes.ok_or_else(|| invalid(text()))?;
            }
        },
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(options: &[MountOption], acl: SessionACL) -> io::Result<MountOptions> {
        let mut config = Config::default();
        config.mount_options = options.to_vec();
        config.acl = acl;
        for_mount(&config)
    }

    /// Options that exclude each other are refused.
    #[test]
    fn what_contradicts_is_refused() {
        for (one, other) in CONTRARY {
            assert!(made(&[one.clone(), other], SessionACL::Owner).is_err());
            assert!(made(&[one], SessionACL::Owner).is_ok());
        }
        let auto = [MountOption::AutoUnmount];
        assert!(made(&auto, SessionACL::Owner).is_err());
        assert!(made(&auto, SessionACL::All).unwrap().allow_other);
    }

    /// A mount honours device files and set-user-ID programs only if its options ask for it.
    #[test]
    fn devices_and_set_user_id_are_off_unless_asked_for() {
        let plain = made(&[], SessionACL::Owner).unwrap();
        assert_eq!(plain.flags, MountFlags::NODEV | MountFlags::NOSUID);
        assert_eq!((&*plain.name, &*plain.subtype), ("/dev/fuse", ""));
        assert!(!plain.allow_other && !plain.default_permissions);
        let asked = [MountOption::Dev, MountOption::Suid, MountOption::RO];
        let asked = made(&asked, SessionACL::Owner).unwrap();
        assert_eq!(asked.flags, MountFlags::RDONLY);
    }

    /// A misspelt mount option is an error that names it.
    #[test]
    fn other_words_are_known_or_refused() {
        let words = [MountOption::CUSTOM("max_read=4096,noexec".into())];
        let options = made(&words, SessionACL::RootAndOwner).unwrap();
        assert_eq!(options.max_read, 4096);
        assert!(options.flags.contains(MountFlags::NOEXEC));
        let error = made(&[MountOption::CUSTOM("swift".into())], SessionACL::Owner);
        assert!(error.unwrap_err().to_string().contains("\"swift\""));
    }
}
