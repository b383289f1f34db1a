// Archives by archive/tar, for archives.py. Usage: archives OUT. Prints the names of those that it writes.
package main

import (
	"archive/tar"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

func main() {
	formats := map[string]tar.Format{"ustar": tar.FormatUSTAR, "pax": tar.FormatPAX, "gnu": tar.FormatGNU, "any": tar.FormatUnknown}
	for name, format := range formats {
		file, err := os.Create(filepath.Join(os.Args[1], "go-"+name))
		if err != nil {
			panic(err)
		}
		to := tar.NewWriter(file)
		at := time.Unix(1500000000, 0)
		long := strings.Repeat("long/", 60) + "name"
		headers := []tar.Header{
			{Name: "plain", Mode: 0o640, Uid: 5, Gid: 6, Size: 3},
			{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o2750},
			{Name: "dir/below", Mode: 0o4755, Size: 3},
			{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "dir"},
			{Name: "link/member", Mode: 0o600, Size: 3},
			{Name: "hard", Typeflag: tar.TypeLink, Linkname: "plain"},
			{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o600},
			{Name: "char", Typeflag: tar.TypeChar, Devmajor: 5, Devminor: 1},
			{Name: "block", Typeflag: tar.TypeBlock, Devmajor: 259, Devminor: 70000},
			{Name: long, Size: 3},
			{Name: "long-link", Typeflag: tar.TypeSymlink, Linkname: long},
			{Name: "owner", Uid: 3000000000, Gid: 4000000000},
			{Name: "old", ModTime: time.Unix(-5, 0)},
			{Name: "fraction", ModTime: time.Unix(5, 123456789)},
			{Name: "before", ModTime: time.Unix(-5, 500000000)},
			{Name: "grün", Size: 3},
			{Name: "latin-\xe4", Size: 3},
			{Name: "records", PAXRecords: map[string]string{"SCHILY.xattr.user.x": "1\n2", "VENDOR.y": "z"}},
			{Name: "old-dir/", Typeflag: tar.TypeReg, Mode: 0o700},
		}
		for _, header := range headers {
			header.Format = format
			if header.ModTime.IsZero() {
				header.ModTime = at
			}
			// Some formats have no room for some of them.
			if to.WriteHeader(&header) == nil && header.Size > 0 {
				fmt.Fprint(to, "abc")
			}
		}
		to.Close()
		file.Close()
		fmt.Println("go-" + name)
	}
}
