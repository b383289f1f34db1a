//! The examples do what they say, one after the other on one image; errors of the library say nothing of any command.

#[path = "../examples/build.rs"]
mod build;
#[path = "../examples/check.rs"]
mod check;
#[path = "../examples/list.rs"]
mod list;
#[path = "../examples/repair.rs"]
mod repair;

use std::fs;
use std::os::unix::fs::FileExt;

#[test]
fn an_image_is_built_listed_checked_and_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir_all(from.join(".git/objects")).unwrap();
    fs::create_dir(from.join("sub")).unwrap();
    fs::write(from.join("sub/file"), "contents").unwrap();
    let image = dir.path().join("image");
    let made = build::build(&from, &image).unwrap();
    // The root, two of the realtime section, and these two.
    assert_eq!(made.inodes, 5);
    let mut out = Vec::new();
    assert_eq!(list::list(&image, &mut out).unwrap(), 0);
    let text = String::from_utf8(out).unwrap();
    let fields: Vec<Vec<&str>> = text.lines().map(|l| l.split('|').collect()).collect();
    let names: Vec<&str> = fields.iter().map(|f| f[1]).collect();
    assert_eq!(names, ["/", "/sub", "/sub/file"]);
    assert_eq!(fields[2][4..7], ["0", "0", "8"]);

    let mut out = Vec::new();
    assert_eq!(check::check(&image, &mut out).unwrap(), 0);
    // The free blocks of the first group (agf_freeblks), whose checksum is then wrong, too.
    let file = fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&[0; 4], 512 + 52).unwrap();
    drop(file);
    assert!(check::check(&image, &mut out).unwrap() > 0);
    assert!(!out.is_empty());
    let before = fs::read(&image).unwrap();
    let mut out = Vec::new();
    assert_eq!(repair::repair(&image, false, &mut out).unwrap(), 0);
    assert!(!out.is_empty() && fs::read(&image).unwrap() == before);
    assert_eq!(repair::repair(&image, true, &mut out).unwrap(), 0);
    assert_eq!(check::check(&image, &mut Vec::new()).unwrap(), 0);

    let none = dir.path().join("none");
    let empty = dir.path().join("empty");
    fs::write(&empty, vec![0; 1 << 20]).unwrap();
    let out = &mut Vec::new();
    for error in [
        build::build(&from, &image).err(),
        build::build(&none, &none).err(),
        list::list(&none, out).err(),
        list::list(&empty, out).err(),
        check::check(&none, out).err(),
        check::check(&empty, out).err(),
        repair::repair(&empty, true, out).err(),
    ] {
        let error = error.expect("it fails").to_string();
        assert!(!error.contains("uvfs ") && !error.contains("--"), "{error}");
        assert!(error.contains(dir.path().to_str().unwrap()), "{error}");
    }
}
