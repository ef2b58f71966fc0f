"""Print a Homebrew formula for an sdist, to be put into a tap.

    python .ci/brew_formula.py dist/afm_mlx-0.1.0.tar.gz https://github.com/OWNER/NAME > Formula/afm-mlx.rb

The formula installs the sdist and its dependencies into an environment of its own. MLX comes as its wheel:
building its Metal library takes all of Xcode.
"""

import hashlib
import sys
from pathlib import Path

FORMULA = """class AfmMlx < Formula
  desc "Run Apple's on-device foundation-model architecture locally, with MLX"
  homepage "{home}"
  url "{home}/releases/download/v{version}/{file}"
  sha256 "{digest}"
  license "MIT"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.13"

  # Wheels of jiter and rpds-py have no room in their headers for Homebrew's longer library paths.
  preserve_rpath

  def install
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    pip = [libexec/"bin/python", "-m", "pip", "--disable-pip-version-check"]
    system(*pip, "install", "#{{buildpath}}[server]")
    bin.install_symlink libexec/"bin/afm-mlx"
    generate_completions_from_executable(bin/"afm-mlx", "completion")
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/afm-mlx --version")
    prompt = "Make this formal:\\nhey Hana, can't make it to the Film Lecture"
    assert_match "Film Lecture", shell_output("#{{bin}}/afm-mlx generate --prompt \\"#{{prompt}}\\"")
  end
end
"""


def formula(sdist: Path, home: str) -> str:
    """Return the formula for an sdist that is a file of the release of its version.

    Args:
        sdist: named afm_mlx-VERSION.tar.gz, as builds name it.
        home: URL of the repository.
    """
    version = sdist.name.removeprefix("afm_mlx-").removesuffix(".tar.gz")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    return FORMULA.format(home=home, version=version, file=sdist.name, digest=digest)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: brew_formula.py SDIST URL_OF_THE_REPOSITORY")
    print(formula(Path(sys.argv[1]), sys.argv[2].rstrip("/")), end="")
