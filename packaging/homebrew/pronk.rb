class Pronk < Formula
  desc "Decode open language models faster, with exactly the tokens of plain decoding"
  homepage "https://pypi.org/project/pronk/"
  url "https://files.pythonhosted.org/packages/source/p/pronk/pronk-@VERSION@.tar.gz"
  sha256 "@SHA256@"
  license "Apache-2.0"

  depends_on "python@3.13"

  # The libraries come as wheels from PyPI in the versions that pronk is tested with; only the kernels are compiled.
  def install
    system "python3.13", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "--constraint", "constraints.txt", ".[serve]"
    bin.install_symlink libexec/"bin/pronk"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/pronk --version")
    assert_match "portable: ok", shell_output("#{bin}/pronk doctor")
  end
end
